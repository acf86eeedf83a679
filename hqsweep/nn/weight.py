"""Quantized views of weights that are not GEMM operands: embedding tables and norm gains."""

import torch
from torch import Tensor

from hqsweep.formats import Identity
from hqsweep.nn.context import current
from hqsweep.quant import HybridQuantizer, QuantizerRole


class _StraightThrough(torch.autograd.Function):
    """Forward: dequantize(quantize(w)); backward: the gradient passes unchanged (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx, weight: Tensor, quantizer: HybridQuantizer, slot: str) -> Tensor:
        matrix = weight.view(-1, weight.shape[-1])
        row = quantizer.quantize(matrix, columnwise=None, key=current().key(slot)).rowwise
        return row.dequantize().view(weight.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def quantized_weight(weight: Tensor, quantizer: HybridQuantizer, role: QuantizerRole) -> Tensor:
    """weight in the values of the quantizer's rowwise format, same dtype; weight itself for fp32."""
    if quantizer.rowwise == Identity(name="fp32"):
        return weight
    return _StraightThrough.apply(weight, quantizer, str(role))
