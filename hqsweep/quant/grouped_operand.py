"""Operands of a group of experts: quantized each by itself, and held together in packed buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hqsweep.formats import Format, RngKey, RngKeys
from hqsweep.ops.grouped import GroupQuantized, exact_group, member_buffers, pack, quantize_grouped
from hqsweep.ops.grouped_layout import GroupedExact, GroupLayout, Splits
from hqsweep.ops.request import Output
from hqsweep.quant.delayed import SlotStates, grids_of, note_group
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOperand:
    """One direction of every expert's matrix. The columnwise member of X_e [m_e, width] has the shape [width, m_e]."""

    format: Format
    layout: GroupLayout
    dtype: torch.dtype
    """Of the matrices that it was made from."""
    buffers: dict[str, Tensor]
    """Flat: the members' buffers one after the other."""

    @cached_property
    def members(self) -> list[Operand]:
        """The operand of each expert, as views; waits as Splits.host does."""
        buffers = member_buffers(self.buffers, self.format, self.layout)
        return [
            Operand(format=self.format, shape=shape, dtype=self.dtype, buffers=own)
            for shape, own in zip(self.layout.shapes, buffers, strict=True)
        ]

    def operand(self) -> GroupedExact:
        """Exact matrices, by rows, and epilogue factors; nothing waits where a kernel decodes."""
        return exact_group(self.buffers, self.format, self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.buffers.values())


Group = GroupedOperand | GroupedExact


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridGroup:
    """Both directions of a group; a direction that was not asked for is None."""

    rowwise: Group | None
    columnwise: Group | None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSkeleton:
    """A GroupedOperand without its tensors."""

    format: Format
    layout: GroupLayout
    dtype: torch.dtype


def flatten_group(group: GroupedOperand) -> tuple[list[Tensor], GroupSkeleton]:
    """Tensors in layout order, and what is needed to put them together again. Copies nothing."""
    tensors = [group.buffers[name] for name in group.format.layout]
    return tensors, GroupSkeleton(format=group.format, layout=group.layout, dtype=group.dtype)


def unflatten_group(tensors: Sequence[Tensor], skeleton: GroupSkeleton) -> GroupedOperand:
    """Inverse of flatten_group."""
    buffers = dict(zip(skeleton.format.layout, tensors, strict=True))
    return GroupedOperand(format=skeleton.format, layout=skeleton.layout, dtype=skeleton.dtype, buffers=buffers)


def quantize_group(
    x: Tensor,
    splits: Splits,
    quantizer: HybridQuantizer,
    *,
    rowwise: Output | None = "codes",
    columnwise: Output | None = "codes",
    keys: Sequence[RngKey | None] | None = None,
    states: Sequence[SlotStates | None] | None = None,
    by_rows: bool = False,
) -> HybridGroup:
    """[rows, width] -> operands of the directions asked for; member e is what quantizer.quantize makes of the rows of
    expert e, to the byte, under its own key and states. by_rows: see quantize_grouped.

    A quantizer of another class with a quantize of its own is called for each expert. Raises as quantize does, naming
    the expert.
    """
    if has_own_quantize(quantizer):
        return _one_by_one(x, splits, quantizer, rowwise, columnwise, keys, states, by_rows)
    needs_row = rowwise is not None or (columnwise and quantizer.columnwise_source == "rowwise_dequantized")
    formats = {
        "rowwise": quantizer.rowwise if needs_row else None,
        "columnwise": quantizer.columnwise if columnwise else None,
    }
    source = quantizer.columnwise_source if columnwise else "original"
    outputs = {"rowwise_output": rowwise or "codes", "columnwise_output": columnwise or "codes"}
    if keys is None and states is None:
        made = quantize_grouped(x, splits, **formats, columnwise_source=source, **outputs, by_rows=by_rows)
        return _groups(made, quantizer, splits, x, rowwise)
    recorded = states is not None and all(states)
    options = outputs | {"by_rows": by_rows}
    options |= {f"{d}_keys": own for d, own in _direction_keys(quantizer, keys).items()}
    if recorded:
        options |= {f"{d}_grids": own for d, own in grids_of(states, formats).items()}
    made = quantize_grouped(x, splits, **formats, columnwise_source=source, **options)
    if recorded:
        note_group(states, x, splits, formats, source, options["rowwise_keys"])
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
    made: GroupQuantized, quantizer: HybridQuantizer, splits: Splits, x: Tensor, rowwise: Output | None
) -> HybridGroup:
    row = _group(made.rowwise, quantizer.rowwise, splits, x, False) if rowwise else None
    return HybridGroup(rowwise=row, columnwise=_group(made.columnwise, quantizer.columnwise, splits, x, True))


def has_own_quantize(quantizer: HybridQuantizer) -> bool:
    """Whether it is of a class whose quantize is not the one of HybridQuantizer, and so is called for each expert."""
    return type(quantizer).quantize is not HybridQuantizer.quantize


def _one_by_one(
    x: Tensor,
    splits: Splits,
    quantizer: HybridQuantizer,
    rowwise: Output | None,
    columnwise: Output | None,
    keys: Sequence[RngKey | None] | None,
    states: Sequence[SlotStates | None] | None,
    by_rows: bool,
) -> HybridGroup:
    nothing = [None] * splits.count
    made = [
        quantizer.quantize(x[start:end], rowwise=rowwise, columnwise=columnwise, key=key, states=own)
        for (start, end), key, own in zip(splits.spans, keys or nothing, states or nothing, strict=True)
    ]
    layouts = {d: GroupLayout(splits=splits, width=x.shape[1], columnwise=d == "columnwise") for d in DIRECTIONS}
    groups = {}
    for direction, layout in layouts.items():
        members, format = [getattr(each, direction) for each in made], getattr(quantizer, direction)
        plain = [member.buffers if isinstance(member, Operand) else member for member in members]
        groups[direction] = _group(pack(plain, format, layout, by_rows=by_rows), format, splits, x, layout.columnwise)
    return HybridGroup(**groups)


def _group(
    made: dict[str, Tensor] | GroupedExact | None, format: Format, splits: Splits, x: Tensor, columnwise: bool
) -> Group | None:
    if made is None or isinstance(made, GroupedExact):
        return made
    layout = splits.layout(x.shape[1], columnwise=columnwise)
    return GroupedOperand(format=format, layout=layout, dtype=x.dtype, buffers=made)
