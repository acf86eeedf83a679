"""Operand: one direction of a quantized matrix, as a plain dataclass that torch operations refuse.

flatten and unflatten are the one way in and out: autograd saves what flatten gives, and so will checkpoints and
offload.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.ops import quantize as ops


@dataclass(frozen=True, kw_only=True, eq=False)
class Operand:
    """A matrix encoded along its last axis. The columnwise operand of X has the shape of X.T."""

    format: Format
    shape: tuple[int, int]
    dtype: torch.dtype
    """dtype of the matrix it was made from, and of dequantize()."""
    buffers: Buffers

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, cols] in TransformerEngine's order of operations, rounded to dtype (default: the source's)."""
        return ops.dequantize(self.buffers, self.format, self.shape, dtype or self.dtype)

    def operand(self) -> ExactOperand:
        """Exact matrix and epilogue factor for gemm=exact."""
        return ops.exact_operand_of(self.buffers, self.format, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.buffers.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridOperand:
    """Both directions of one tensor; a direction that was not asked for is None, one to multiply at once is exact."""

    rowwise: Operand | ExactOperand | None
    columnwise: Operand | ExactOperand | None


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """An Operand without its tensors: hashable, picklable."""

    format: Format
    shape: tuple[int, int]
    dtype: torch.dtype


def flatten(operand: Operand) -> tuple[list[Tensor], Skeleton]:
    """Tensors in layout order, and what is needed to put them together again. Copies nothing."""
    tensors = [operand.buffers[name] for name in operand.format.layout]
    return tensors, Skeleton(format=operand.format, shape=operand.shape, dtype=operand.dtype)


def unflatten(tensors: Sequence[Tensor], skeleton: Skeleton) -> Operand:
    """Inverse of flatten."""
    buffers = dict(zip(skeleton.format.layout, tensors, strict=True))
    return Operand(format=skeleton.format, shape=skeleton.shape, dtype=skeleton.dtype, buffers=buffers)
