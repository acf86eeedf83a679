"""Rounding of tensors that are not GEMM operands: embedding tables, norm gains, boundaries between modules."""

from collections.abc import Callable

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Identity, RngKey
from hqsweep.nn.core.wire import Part
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import Operand


class _StraightThrough(torch.autograd.Function):
    """Forward: dequantize(quantize(x)). Backward: the gradient unchanged (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx, x: Tensor, quantize: Callable[[Tensor], Operand]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operand = quantize(rows)
        if operand.layout is None:
            return operand.dequantize().view(x.shape)
        parts = [member.dequantize() for member in operand.members]
        left_over = rows[sum(map(len, parts)) :]  # padding after the last expert
        return torch.cat([*parts, left_over]).view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def rounded(
    x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None = None, part: Part | None = None
) -> Tensor:
    """Return x [..., n] rounded to the quantizer's rowwise format, in x's dtype; x itself for fp32.

    part: how ranks share x.
    """

    def quantize(rows: Tensor) -> Operand:
        if part is not None:
            return part.quantize(quantizer, rows, rowwise="codes", key=key, states=states).rowwise
        return quantizer.quantize(rows, columnwise=None, key=key, states=states).rowwise

    return rounded_by(x, quantizer, quantize)


def rounded_by(x: Tensor, quantizer: HybridQuantizer, quantize: Callable[[Tensor], Operand]) -> Tensor:
    """Return rounded() with a given function that returns the rowwise operand of x, as a matrix or per expert."""
    if quantizer.rowwise.rht:
        raise UserError(f"{quantizer}: values are rounded without a transform; drop +rht of the rowwise format")
    return x if quantizer.rowwise == Identity(name="fp32") else _StraightThrough.apply(x, quantize)
