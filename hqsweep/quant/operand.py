"""Operand: one direction of a quantized matrix, or of many, as a plain dataclass that torch operations refuse.

flatten() and unflatten() are the only conversions to and from tensors: autograd, checkpoints and offload use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Buffers, ExactOperand, Format
from hqsweep.memo import cached_property
from hqsweep.ops.layout import GroupLayout, Layout, Result, member_buffers
from hqsweep.ops.quantize.dequantize import dequantize, exact_operand_of, exact_operand_of_parts
from hqsweep.ops.splits import Splits


@dataclass(frozen=True, kw_only=True, eq=False)
class Operand:
    """A matrix encoded along its last axis. The columnwise operand of X has the shape of X.T.

    With a layout it holds many matrices, the members of a group, in packed buffers, and has no shape.
    """

    format: Format
    shape: tuple[int, int] | None = None
    layout: Layout | None = None
    """The layout of a group's members; None: one matrix."""
    dtype: torch.dtype
    """dtype of the source matrix and of dequantize()."""
    buffers: Buffers
    """The format's buffers. Buffers of a group are flat, with members one after the other and spare room at the end."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values [rows, cols] in TransformerEngine's order of operations, rounded to dtype (default: the
        source's)."""
        return dequantize(self.buffers, self.format, self.shape, dtype or self.dtype)

    def operand(self) -> ExactOperand:
        """Return the exact matrix and epilogue factor for gemm=exact. A group's are packed, stored by rows.

        Nothing waits if a kernel decodes.
        """
        return exact_operand_of(self.buffers, self.format, self.layout or self.shape)

    @cached_property
    def members(self) -> list["Operand"]:
        """The operand of each member of a group, as views; waits as Splits.host does."""
        shapes, buffers = self.layout.shapes, member_buffers(self.buffers, self.format, self.layout)
        return [
            Operand(format=self.format, shape=shape, dtype=self.dtype, buffers=own)
            for shape, own in zip(shapes, buffers, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.buffers.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class OperandParts:
    """An operand whose columns are split into parts, from left to right: operands of one shape and one format."""

    parts: Sequence[Operand]

    def operand(self) -> ExactOperand:
        """Return Operand.operand() of the whole."""
        first = self.parts[0]
        return exact_operand_of_parts([part.buffers for part in self.parts], first.format, first.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """Operands of experts, each in its own memory."""

    members: Sequence[Operand | ExactOperand]


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridOperand:
    """Both directions of one tensor: None if unwanted, an ExactOperand to multiply at once, or an Operand to keep."""

    rowwise: Operand | ExactOperand | None
    columnwise: Operand | ExactOperand | None
    rowwise_exact: ExactOperand | None = None
    """rowwise.operand(), if the quantizing pass has written it."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """An Operand without its tensors, or `parts` equal ones of an OperandParts; hashable and picklable."""

    format: Format
    shape: tuple[int, int] | None
    layout: Layout | None
    dtype: torch.dtype
    parts: int = 1


def flatten(operand: Operand | OperandParts) -> tuple[list[Tensor], Skeleton]:
    """Return the tensors in layout order, and the skeleton from which unflatten() restores the operand. Nothing is
    copied."""
    if isinstance(operand, OperandParts):
        parts = [flatten(part) for part in operand.parts]
        return [tensor for tensors, _ in parts for tensor in tensors], replace(parts[0][1], parts=len(parts))
    tensors = [operand.buffers[name] for name in operand.format.layout]
    skeleton = Skeleton(format=operand.format, shape=operand.shape, layout=operand.layout, dtype=operand.dtype)
    return tensors, skeleton


def unflatten(tensors: Sequence[Tensor], skeleton: Skeleton) -> Operand | OperandParts:
    """Return the inverse of flatten()."""
    if skeleton.parts > 1:
        one, count = replace(skeleton, parts=1), len(tensors) // skeleton.parts
        return OperandParts(parts=[unflatten(tensors[i : i + count], one) for i in range(0, len(tensors), count)])
    buffers = dict(zip(skeleton.format.layout, tensors, strict=True))
    format, shape, layout, dtype = skeleton.format, skeleton.shape, skeleton.layout, skeleton.dtype
    return Operand(format=format, shape=shape, layout=layout, dtype=dtype, buffers=buffers)


def narrow(operand: Operand, axis: int, start: int, stop: int) -> Operand:
    """Return the operand of rows (axis 0) or columns (axis 1) start to stop, as views of the buffers.

    Entries that cover the whole axis are kept. UserError for a cut inside a block.
    """
    size, buffers = operand.shape[axis], {}
    for name, buffer in operand.format.layout.items():
        divisor, tensor = (buffer.rows, buffer.cols)[axis], operand.buffers[name]
        if divisor == WHOLE:
            buffers[name] = tensor
            continue
        if start % divisor or (stop % divisor and stop != size):
            raise UserError(
                f"slice {start}:{stop} of {size} cuts a block of {operand.format}: give multiples of"
                f" {_block(operand.format, axis)}, or slice dequantize()"
            )
        buffers[name] = tensor.narrow(axis, start // divisor, -(-stop // divisor) - start // divisor)
    shape = tuple(stop - start if i == axis else n for i, n in enumerate(operand.shape))
    return Operand(format=operand.format, shape=shape, dtype=operand.dtype, buffers=buffers)


def has_whole_entries(operand: Operand, axis: int) -> bool:
    """Return whether a buffer has one entry for the whole axis, such as a tensor's scale."""
    return any((buffer.rows, buffer.cols)[axis] == WHOLE for buffer in operand.format.layout.values())


def joined(operands: list[HybridOperand], axis: int) -> HybridOperand:
    """Return the operands of pieces that are adjacent along an axis of a matrix, as one."""
    if len(operands) == 1:
        return operands[0]
    rows, columns = [each.rowwise for each in operands], [each.columnwise for each in operands]
    return HybridOperand(
        rowwise=None if rows[0] is None else _joined(rows, axis),
        columnwise=None if columns[0] is None else _joined(columns, 1 - axis),
    )


def _joined(operands: list[Operand | ExactOperand], axis: int) -> Operand | ExactOperand:
    """Return the joined operand of pieces that are adjacent along an axis of the operand."""
    first = operands[0]
    if isinstance(first, ExactOperand):  # from formats with random bits; all share a factor
        return replace(first, matrix=torch.cat([operand.matrix for operand in operands], axis))
    cut = [name for name, buffer in first.format.layout.items() if (buffer.rows, buffer.cols)[axis] != WHOLE]
    buffers = {name: torch.cat([operand.buffers[name] for operand in operands], axis) for name in cut}
    shape = list(first.shape)
    shape[axis] *= len(operands)
    return replace(first, buffers={**first.buffers, **buffers}, shape=tuple(shape))


def _block(format: Format, axis: int) -> int:
    return max((buffer.rows, buffer.cols)[axis] for buffer in format.layout.values())


def operands_of(
    quantizer: Any,
    results: Any,
    shape: tuple[int, int],
    dtype: torch.dtype,
    splits: Splits | None,
    rowwise: str | None,
) -> HybridOperand:
    """Return the operands of a matrix with this shape, the rowwise one only if wanted. results: Quantized."""
    row = operand_of(results.rowwise, quantizer.rowwise, shape, dtype, splits) if rowwise else None
    column = operand_of(results.columnwise, quantizer.columnwise, shape[::-1], dtype, splits, columnwise=True)
    return HybridOperand(rowwise=row, columnwise=column)


def operand_of(
    result: Result | None,
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype,
    splits: Splits | None,
    *,
    columnwise: bool = False,
) -> Operand | ExactOperand | None:
    """Return the operand of a result. shape: of the operand; for packed operands of X, or of X.T."""
    if result is None or isinstance(result, ExactOperand):
        return result
    if splits is not None:
        layout = GroupLayout.of(splits, shape[0] if columnwise else shape[1], columnwise=columnwise)
        return Operand(format=format, layout=layout, dtype=dtype, buffers=result)
    return Operand(format=format, shape=shape, dtype=dtype, buffers=result)
