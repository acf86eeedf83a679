"""GroupedTensor: the weights of all experts as one parameter [E, N, K], held as their quantized operands.

Every expert is quantized by itself, with scales, random bits and states of its own; members are views of the packed
buffers, so that writing to one writes to the group. What holds for a HybridQuantizedTensor holds here, with the first
axis counting experts: it can be cut between experts only, and one expert is a HybridQuantizedTensor [N, K].

Members may also have any shapes [m_e, k_e]. The group is flat then, [sum of m_e * k_e], as a buffer in which they lie
one after the other; it is written, copied and saved as a whole, and `members` are its parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.ops.layout import refuse_unlike
from hqsweep.ops.shapes import Shapes
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.group import quantize_group
from hqsweep.quant.grouped_metadata import GroupMetadata
from hqsweep.quant.homogeneous import homogeneous
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.quant.tensor import INIT_VAL, HybridQuantizedTensor

aten = torch.ops.aten
AXES = 3
MemberShapes = Sequence[Sequence[int]]


class GroupedTensor(HybridQuantizedTensor):
    """The operands of `quantizer` for each expert of a tensor [E, N, K], or for each of the members of a group of other
    shapes; make it with quantize(), empty(), of() or packed().

    rowwise encodes each [N, K], columnwise its transpose. The key of random bits is that of the group, and "/e" is
    added to its slot for expert e, as a role with an expert has it.
    """

    rowwise: Operand | None
    columnwise: Operand | None
    states: Sequence[SlotStates | None] | None
    """Of each expert."""
    metadata_type = GroupMetadata

    @classmethod
    def takes(cls, shape: Sequence[int]) -> bool:
        """Whether it is [experts, rows, columns]."""
        return len(shape) == AXES and shape[0] > 0

    def in_kind(self, size: Sequence[int]) -> Sequence[Any] | None:
        shapes = self.metadata.shapes
        return shapes.members if shapes and tuple(size) == tuple(self.shape) else super().in_kind(size)

    @classmethod
    def metadata_of(cls, shape: Sequence[int], *, shapes: Shapes | None = None, **facts: Any) -> GroupMetadata:
        """That of a tensor [E, N, K], or of a flat one whose members have these shapes."""
        if shapes is not None:
            return GroupMetadata(matrix=(1, shapes.total), experts=shapes.count, shapes=shapes, **facts)
        if not cls.takes(shape):
            raise UserError(f"a grouped tensor is [experts, rows, columns], not of shape {tuple(shape)}")
        return GroupMetadata(matrix=(shape[0] * shape[1], shape[2]), experts=shape[0], **facts)

    @classmethod
    def empty(cls, shape: Sequence[int] | MemberShapes, quantizer: HybridQuantizer, **options: Any) -> Self:
        """As HybridQuantizedTensor.empty. shape: [E, N, K], or [m_e, k_e] of each member: where they differ the group
        is flat, else it is [E, m, k]. UserError, naming the member, for a shape that a format cannot hold."""
        if not (len(shape) and isinstance(shape[0], Sequence)):
            return super().empty(shape, quantizer, **options)
        shapes = Shapes.of(shape)
        if shapes.equal:
            return super().empty((shapes.count, *shapes.equal), quantizer, **options)
        return super().empty((shapes.total,), quantizer, shapes=shapes, **options)

    @classmethod
    def quantize(
        cls,
        x: Tensor | Sequence[Tensor],
        quantizer: HybridQuantizer,
        *,
        shapes: MemberShapes | None = None,
        source_dtype: torch.dtype | None = None,
        directions: Sequence[str] = DIRECTIONS,
        key: RngKey | None = None,
        states: Sequence[SlotStates | None] | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> Self:
        """As HybridQuantizedTensor.quantize of x [E, N, K], of a tensor [m_e, k_e] for each member, or, with `shapes`,
        of a flat buffer in which members of these shapes follow each other, and that may be longer. Of empty()'s shape.

        Members of one width are quantized by one call, as experts are. Others take a call for each, unless their rows
        alone are wanted, in blocks that divide the widths. UserError, naming the member, for one without two axes and
        for tensors of more than one dtype or device.
        """
        if not isinstance(x, Tensor):
            if shapes is not None:
                raise UserError("quantize: shapes are for a flat buffer; a tensor for each member has its own")
            shapes, x = Shapes.of([part.shape for part in x]).members, _joined(x)
        elif shapes is not None:
            x = _used(x, Shapes.of(shapes))
        options = {"dtype": x.dtype, "source_dtype": source_dtype, "device": x.device, "directions": directions}
        made = cls.empty(x.shape if shapes is None else shapes, quantizer, **options)
        keep = {"key": key, "states": states, "preserve": preserve_high_precision_init_val}
        return made.begin_with(x.view(made.shape), **keep)

    def quantize_(self, x: Tensor | Sequence[Tensor], *, key: RngKey | None = None) -> Self:
        """As HybridQuantizedTensor.quantize_; x may also be a tensor for each member, of its shape."""
        if not isinstance(x, Tensor):
            got, own = [tuple(part.shape) for part in x], self.metadata.member_shapes
            if got != own:
                raise UserError(f"quantize_: got tensors of shapes {got} for members of shapes {own}")
            x = _joined(x).view(self.shape)
        return super().quantize_(x, key=key)

    @classmethod
    def of(cls, members: Sequence[HybridQuantizedTensor]) -> Self:
        """A copy of the experts' tensors [N, K], to the byte; UserError where they differ in more than their values."""
        first = members[0]
        for expert, member in enumerate(members):
            if member.shape != first.shape:
                raise UserError(
                    f"grouped tensor: expert {expert} is {tuple(member.shape)}, and expert 0 {tuple(first.shape)}; one"
                    " parameter [E, N, K] takes experts of one shape, and packed() takes any"
                )
        return cls.packed(members)

    @classmethod
    def packed(cls, members: Sequence[HybridQuantizedTensor]) -> Self:
        """A copy of tensors [m_e, k_e] in one memory, to the byte; UserError where they differ in more than their
        values and shapes. Of empty()'s shape."""
        first = members[0]
        quantizer = homogeneous([member.quantizer for member in members], "grouped tensor: weight")
        for expert, member in enumerate(members):
            if (member.dtype, member.metadata.directions) != (first.dtype, first.metadata.directions):
                got, other = (f"{m.dtype} {m.metadata.directions}" for m in (member, first))
                raise UserError(f"grouped tensor: expert {expert} is {got}, and expert 0 {other}")
        meta = first.metadata
        made = cls.empty(
            [member.shape for member in members], quantizer, dtype=first.dtype, source_dtype=meta.source_dtype,
            device=first.device, directions=meta.directions,
            key=meta.key and replace(meta.key, slot=meta.key.slot.removesuffix("/0")),
        )  # fmt: skip
        for own, member in zip(made.members, members, strict=True):
            own.write_(member)
        preserved = [member.high_precision_init_val for member in members]
        if all(value is not None for value in preserved):
            made.high_precision_init_val = torch.cat([value.reshape(-1) for value in preserved]).view(made.shape)
        return made

    def reused_for(self, shapes: MemberShapes) -> Self:
        """A group of these shapes in the first part of the memory of this one, whose rest is room to spare and is left
        as it is; no states, and values are open until it is written. UserError where a buffer is too short."""
        meta = self.metadata
        facts = {"dtype": self.dtype, "source_dtype": meta.source_dtype, "directions": meta.directions, "key": meta.key}
        wanted, buffers = type(self).empty(shapes, self.quantizer, device="meta", **facts), {}
        for name, buffer in wanted.buffers.items():
            held = self.buffers[name]
            if buffer.numel() > held.numel():
                raise UserError(
                    f"members of these shapes take {buffer.numel()} entries of {name}, and the group has {held.numel()}"
                )
            buffers[name] = held[: buffer.numel()]
        return type(self)(buffers, wanted.metadata, wanted.shape)

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.metadata.experts

    @property
    def members(self) -> list[HybridQuantizedTensor]:
        """The tensor of each expert [N, K]: views, which share memory with the group, and its states."""
        meta = self.metadata
        operands = {d: getattr(self, d).members for d in meta.directions}
        preserved = self.high_precision_init_val
        if preserved is not None and meta.shapes:
            preserved = meta.shapes.parts(preserved)
        made = []
        for expert in range(meta.experts):
            own = {f"{d}_{name}": operands[d][expert].buffers[name] for d, name in meta.stored}
            if preserved is not None:
                own[INIT_VAL] = preserved[expert]
            facts = meta.member(expert)
            member = HybridQuantizedTensor(own, facts, facts.matrix)
            member.states = self.states and self.states[expert]
            made.append(member)
        return made

    def operands_of(self, matrix: Tensor, wanted: Mapping[str, Any], key: RngKey | None) -> HybridOperand:
        meta = self.metadata
        states = self.states and [state and replace(state, record=True, held=True) for state in self.states]
        x = matrix.view(-1) if meta.shapes else matrix
        return quantize_group(x, meta.splits, self.quantizer, **wanted, keys=meta.keys(key), states=states)

    def check_view(self, shape: Sequence[int]) -> None:
        """UserError for a flat group in any other shape."""
        shapes = self.metadata.shapes
        if shapes and tuple(shape) != (shapes.total,):
            refuse_unlike(
                shapes.members, f"a view {list(shape)} of a group", instead="; it is flat, or take its members"
            )

    def values(self, dtype: torch.dtype) -> Tensor:
        if self.rowwise is not None:
            parts = [member.dequantize(dtype) for member in self.rowwise.members]
        else:
            parts = [member.dequantize(dtype).t() for member in self.columnwise.members]
        if self.metadata.shapes:
            return torch.cat([part.reshape(-1) for part in parts])
        return torch.stack(parts).view(self.shape)


def _joined(members: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype and device as a flat one; UserError for others, naming the first."""
    first = members[0]
    for expert, member in enumerate(members):
        if (member.dtype, member.device) != (first.dtype, first.device):
            got, other = (f"{m.dtype} on {m.device}" for m in (member, first))
            raise UserError(f"member {expert} of a group is {got}, and member 0 {other}")
    return torch.cat([member.reshape(-1) for member in members])


def _used(x: Tensor, shapes: Shapes) -> Tensor:
    """The part of a buffer that members of these shapes take."""
    if x.numel() < shapes.total:
        raise UserError(f"a buffer of {x.numel()} elements for members of {shapes.total}")
    return x.reshape(-1)[: shapes.total]


def _experts(x: GroupedTensor, dim: int, operation: str) -> None:
    """UserError unless the axis is the one of experts."""
    if x.metadata.shapes:
        refuse_unlike(
            x.metadata.member_shapes, f"{operation} of a group", instead="; take its members, or use dequantize()"
        )
    if x.dim() != AXES or dim % x.dim() != 0:
        raise UserError(
            f"{operation} along axis {dim} of a grouped tensor of shape {tuple(x.shape)}; it can be cut along the first"
            f" axis of [experts, rows, columns], or use dequantize()"
        )


def _unbind(x: GroupedTensor, dim: int = 0) -> list[HybridQuantizedTensor]:
    _experts(x, dim, "unbind")
    return x.members


def _select(x: GroupedTensor, dim: int, index: int) -> HybridQuantizedTensor:
    _experts(x, dim, "select")
    return x.members[index]


def _slice(
    x: GroupedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> GroupedTensor:
    """Experts start to end, as views."""
    start, stop, _ = slice(start, end).indices(x.shape[dim])
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x.view_of(x.buffers, x.shape)
    _experts(x, dim, "slice")
    if step != 1 or stop <= start:
        raise UserError(f"slice {start}:{stop}:{step} of {x.experts} experts; it takes step 1 and one expert or more")
    meta, count = x.metadata, stop - start
    buffers = {}
    for direction, name in meta.stored:
        flat = x.buffers[f"{direction}_{name}"]
        buffers[f"{direction}_{name}"] = flat.view(meta.experts, -1)[start:stop].view(-1)
    if x.high_precision_init_val is not None:
        buffers[INIT_VAL] = x.high_precision_init_val[start:stop]
    matrix = (count * x.shape[1], x.shape[2])
    made = x.view_of(buffers, (count, *x.shape[1:]), matrix=matrix, experts=count, first=meta.first + start)
    made.states = x.states and x.states[start:stop]
    return made


def _split(x: GroupedTensor, size: int, dim: int = 0) -> list[GroupedTensor]:
    return [_slice(x, dim, start, start + size) for start in range(0, x.shape[dim], size)]


def _split_with_sizes(x: GroupedTensor, sizes: list[int], dim: int = 0) -> list[GroupedTensor]:
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(x, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


GroupedTensor.handlers = {
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
}
