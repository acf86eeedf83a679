"""Rounding of tensors that are not GEMM operands: embedding tables, norm gains, boundaries between modules."""

import torch
from torch import Tensor

from hqsweep.formats import Identity, RngKey
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer


class _StraightThrough(torch.autograd.Function):
    """Forward: dequantize(quantize(x)); backward: the gradient passes unchanged (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx, x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None) -> Tensor:
        matrix = x.reshape(-1, x.shape[-1])
        row = quantizer.quantize(matrix, columnwise=None, key=key, states=states).rowwise
        return row.dequantize().view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


def rounded(x: Tensor, quantizer: HybridQuantizer | None, key: RngKey, states: SlotStates | None = None) -> Tensor:
    """x [..., n] in the values of the quantizer's rowwise format, same dtype; x itself for None and fp32."""
    if quantizer is None or quantizer.rowwise == Identity(name="fp32"):
        return x
    return _StraightThrough.apply(x, quantizer, key, states)
