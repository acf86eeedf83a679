"""Operands of a group of experts: quantized each by itself, and held together in packed buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey, RngKeys
from hqsweep.ops.dequantize import exact_operand_of
from hqsweep.ops.layout import GroupLayout, Layout
from hqsweep.ops.packed import PackedExact, member_buffers, pack
from hqsweep.ops.quantize import Quantized, quantize
from hqsweep.ops.request import Output, Target
from hqsweep.ops.shapes import Shapes
from hqsweep.ops.splits import Splits
from hqsweep.quant.delayed import SlotStates, grids_of, note_group
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import Operand, Skeleton, flatten, unflatten


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOperand:
    """One direction of every expert's matrix. The columnwise member of X_e [m_e, k_e] has the shape [k_e, m_e]."""

    format: Format
    layout: Layout
    dtype: torch.dtype
    """Of the matrices that it was made from."""
    buffers: dict[str, Tensor]
    """Flat: the members' buffers one after the other; there may be room behind them."""

    @cached_property
    def members(self) -> list[Operand]:
        """The operand of each expert, as views; waits as Splits.host does."""
        buffers = member_buffers(self.buffers, self.format, self.layout)
        return [
            Operand(format=self.format, shape=shape, dtype=self.dtype, buffers=own)
            for shape, own in zip(self.layout.shapes, buffers, strict=True)
        ]

    def operand(self) -> PackedExact:
        """Exact matrices, by rows, and epilogue factors; nothing waits where a kernel decodes."""
        return exact_operand_of(self.buffers, self.format, self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.buffers.values())


Group = GroupedOperand | PackedExact


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridGroup:
    """Both directions of a group; a direction that was not asked for is None."""

    rowwise: Group | None
    columnwise: Group | None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSkeleton:
    """A GroupedOperand without its tensors."""

    format: Format
    layout: Layout
    dtype: torch.dtype


def flatten_group(group: GroupedOperand) -> tuple[list[Tensor], GroupSkeleton]:
    """Tensors in layout order, and what is needed to put them together again. Copies nothing."""
    tensors = [group.buffers[name] for name in group.format.layout]
    return tensors, GroupSkeleton(format=group.format, layout=group.layout, dtype=group.dtype)


def unflatten_group(tensors: Sequence[Tensor], skeleton: GroupSkeleton) -> GroupedOperand:
    """Inverse of flatten_group."""
    buffers = dict(zip(skeleton.format.layout, tensors, strict=True))
    return GroupedOperand(format=skeleton.format, layout=skeleton.layout, dtype=skeleton.dtype, buffers=buffers)


def flatten_any(operand: Operand | GroupedOperand) -> tuple[list[Tensor], Skeleton | GroupSkeleton]:
    """flatten or flatten_group."""
    return flatten_group(operand) if isinstance(operand, GroupedOperand) else flatten(operand)


def unflatten_any(tensors: Sequence[Tensor], skeleton: Skeleton | GroupSkeleton) -> Operand | GroupedOperand:
    """Inverse of flatten_any."""
    return unflatten_group(tensors, skeleton) if isinstance(skeleton, GroupSkeleton) else unflatten(tensors, skeleton)


def quantize_group(
    x: Tensor,
    splits: Splits | Shapes,
    quantizer: HybridQuantizer,
    *,
    rowwise: Output | None = "codes",
    columnwise: Output | None = "codes",
    keys: Sequence[RngKey | None] | None = None,
    states: Sequence[SlotStates | None] | None = None,
    by_rows: bool = False,
) -> HybridGroup:
    """[rows, width] -> operands of the directions asked for; member e is what quantizer.quantize makes of the rows of
    expert e, to the byte, under its own key and states. by_rows: see Target.

    With Shapes x is flat, contiguous, and may have room to spare. Members of one width are then quantized at once, as
    with Splits; others by a call for each, unless their rows alone are wanted and Shapes.folded finds a matrix.
    A quantizer of another class with a quantize of its own is called for each expert. Raises as quantize does, naming
    the expert.
    """
    if isinstance(splits, Shapes):
        return _of_shapes(x, splits, quantizer, rowwise, columnwise, keys, states, by_rows)
    if has_own_quantize(quantizer):
        parts = [x[start:end] for start, end in splits.spans]
        layouts = [GroupLayout.of(splits, x.shape[1], columnwise=d == "columnwise") for d in DIRECTIONS]
        return _one_by_one(parts, layouts, quantizer, rowwise, columnwise, keys, states, by_rows)
    source = quantizer.columnwise_source if columnwise else "original"
    row_format = quantizer.rowwise if rowwise or source == "rowwise_dequantized" else None
    column_format = quantizer.columnwise if columnwise else None
    row_output, column_output = rowwise or "codes", columnwise or "codes"
    if keys is None and states is None:
        targets = Target(row_format, row_output), Target(column_format, column_output, by_rows=by_rows)
        made = quantize(x, *targets, columnwise_source=source, splits=splits)
        return _groups(made, quantizer, splits, x, rowwise)
    recorded = states is not None and all(states)
    formats = {"rowwise": row_format, "columnwise": column_format}
    own_keys = _direction_keys(quantizer, keys)
    grids = grids_of(states, formats) if recorded else {}
    row = Target(row_format, row_output, own_keys["rowwise"], grids.get("rowwise"))
    column = Target(column_format, column_output, own_keys["columnwise"], grids.get("columnwise"), by_rows)
    made = quantize(x, row, column, columnwise_source=source, splits=splits)
    if recorded:
        note_group(states, x, splits, formats, source, own_keys["rowwise"])
    return _groups(made, quantizer, splits, x, rowwise)


def _direction_keys(
    quantizer: HybridQuantizer, keys: Sequence[RngKey | None] | None
) -> dict[str, Sequence[RngKey | None] | None]:
    """HybridQuantizer.direction_keys of every expert."""
    if keys is None or isinstance(keys, RngKeys):
        return quantizer.direction_keys(keys)
    each = [quantizer.direction_keys(key) for key in keys]
    return {direction: [own[direction] for own in each] for direction in DIRECTIONS}


def _groups(
    made: Quantized, quantizer: HybridQuantizer, splits: Splits, x: Tensor, rowwise: Output | None
) -> HybridGroup:
    row, column = made.rowwise if rowwise else None, made.columnwise
    if type(row) is dict:
        row = _group(row, quantizer.rowwise, splits, x, False)
    if type(column) is dict:
        column = _group(column, quantizer.columnwise, splits, x, True)
    return HybridGroup(rowwise=row, columnwise=column)


def has_own_quantize(quantizer: HybridQuantizer) -> bool:
    """Whether it is of a class whose quantize is not the one of HybridQuantizer, and so is called for each expert."""
    return type(quantizer).quantize is not HybridQuantizer.quantize


def _of_shapes(
    x: Tensor,
    shapes: Shapes,
    quantizer: HybridQuantizer,
    rowwise: Output | None,
    columnwise: Output | None,
    keys: Sequence[RngKey | None] | None,
    states: Sequence[SlotStates | None] | None,
    by_rows: bool,
) -> HybridGroup:
    found = None if shapes.width is None else (shapes.width, shapes.splits)
    if found is None and rowwise and not columnwise and not has_own_quantize(quantizer):
        found = shapes.folded(quantizer.rowwise)
    if found is not None:
        width, splits = found
        options = {"rowwise": rowwise, "columnwise": columnwise, "keys": keys, "states": states, "by_rows": by_rows}
        made = quantize_group(x[: shapes.total].view(splits.rows, width), splits, quantizer, **options)
        if width == shapes.width:
            return made
        return replace(made, rowwise=replace(made.rowwise, layout=shapes.layout(columnwise=False)))
    layouts = [shapes.layout(columnwise=direction == "columnwise") for direction in DIRECTIONS]
    return _one_by_one(shapes.parts(x), layouts, quantizer, rowwise, columnwise, keys, states, by_rows)


def _one_by_one(
    parts: Sequence[Tensor],
    layouts: Sequence[Layout],
    quantizer: HybridQuantizer,
    rowwise: Output | None,
    columnwise: Output | None,
    keys: Sequence[RngKey | None] | None,
    states: Sequence[SlotStates | None] | None,
    by_rows: bool,
) -> HybridGroup:
    made, nothing = [], [None] * len(parts)
    for expert, (part, key, own) in enumerate(zip(parts, keys or nothing, states or nothing, strict=True)):
        try:
            made.append(quantizer.quantize(part, rowwise=rowwise, columnwise=columnwise, key=key, states=own))
        except UserError as error:
            raise UserError(f"expert {expert}: {error}") from None
    groups = {}
    for direction, layout in zip(DIRECTIONS, layouts, strict=True):
        members, format = [getattr(each, direction) for each in made], getattr(quantizer, direction)
        plain = [member.buffers if isinstance(member, Operand) else member for member in members]
        packed = pack(plain, format, layout, by_rows=by_rows)
        if isinstance(packed, dict):
            packed = GroupedOperand(format=format, layout=layout, dtype=parts[0].dtype, buffers=packed)
        groups[direction] = packed
    return HybridGroup(**groups)


def _group(
    made: dict[str, Tensor] | PackedExact | None, format: Format, splits: Splits, x: Tensor, columnwise: bool
) -> Group | None:
    if made is None or isinstance(made, PackedExact):
        return made
    layout = GroupLayout.of(splits, x.shape[1], columnwise=columnwise)
    return GroupedOperand(format=format, layout=layout, dtype=x.dtype, buffers=made)
