"""Rounding of tensors that are not GEMM operands: embedding tables, norm gains, boundaries between modules."""

from collections.abc import Callable

import torch
from torch import Tensor

from hqsweep.formats import Identity, RngKey
from hqsweep.nn.core.wire import Part
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import Operand


class _StraightThrough(torch.autograd.Function):
    """Forward: dequantize(quantize(x)); backward: the gradient passes unchanged (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx, x: Tensor, quantize: Callable[[Tensor], Operand]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operand = quantize(rows)
        if operand.layout is None:
            return operand.dequantize().view(x.shape)
        parts = [member.dequantize() for member in operand.members]
        left_over = rows[sum(map(len, parts)) :]  # of no expert, behind the last one
        return torch.cat([*parts, left_over]).view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def rounded(
    x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None = None, part: Part | None = None
) -> Tensor:
    """x [..., n] in the values of the quantizer's rowwise format, same dtype; x itself for fp32. part: where x lies
    over ranks."""

    def quantize(rows: Tensor) -> Operand:
        if part is not None:
            return part.quantize(quantizer, rows, rowwise="codes", key=key, states=states).rowwise
        return quantizer.quantize(rows, columnwise=None, key=key, states=states).rowwise

    return rounded_by(x, quantizer, quantize)


def rounded_by(x: Tensor, quantizer: HybridQuantizer, quantize: Callable[[Tensor], Operand]) -> Tensor:
    """rounded, where quantize gives the rowwise operand of x as a matrix, or that of each expert's rows."""
    return x if quantizer.rowwise == Identity(name="fp32") else _StraightThrough.apply(x, quantize)
