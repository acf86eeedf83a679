"""GroupedTensor: the weights of all experts as one parameter [E, N, K], held as quantized operands.

Each expert is quantized by itself, with its own scales, random bits and states. Members are views of the packed
buffers, so that writing to a member writes to the group. A GroupedTensor behaves like a HybridQuantizedTensor whose
first axis counts experts. One expert is a HybridQuantizedTensor [N, K]; slices select experts. fully_shard cuts the
group between experts, or cuts rows or columns of every expert. The shards then have the bytes of their parts.

Members may have different shapes [m_e, k_e]. The group is then flat, [sum of m_e * k_e], with members one after the
other. It is written, copied and saved as a whole, and `members` are its parts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.ops.layout import Shapes, refuse_unlike, stored_by_rows
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.parallel.shards.fsdp2 import with_sharding
from hqsweep.parallel.shards.shard import Cut
from hqsweep.parallel.shards.shard_part import Part, is_part
from hqsweep.quant.content import AXES, ManyMatrices, MemberShapes, joined
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.group import Wanted, homogeneous, quantize_group, quantize_group_part
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.quant.tensor import INIT_VAL, HybridQuantizedTensor

aten = torch.ops.aten


class GroupedTensor(HybridQuantizedTensor):
    """The quantized operands of each expert in [E, N, K], or of each member of a group with other shapes.

    Make it with quantize(), empty(), of() or packed(). rowwise encodes each [N, K], columnwise its transpose. The key
    of random bits belongs to the group; expert e draws from the slot with "/e" appended, as a role with an expert does.
    """

    rowwise: Operand | None
    columnwise: Operand | None
    states: Sequence[SlotStates | None] | None
    """The states of each expert's slot."""
    content_type = ManyMatrices

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
        """Return the quantized form of x [E, N, K], or of one tensor [m_e, k_e] per member, in empty()'s shape.

        shapes: x is a flat buffer with members of these shapes, one after the other; it may be longer.
        The other arguments are those of HybridQuantizedTensor.quantize.

        Members of one width are quantized in one call, like experts. Others take a call each, unless only rowwise
        operands are wanted, in blocks that divide the widths. UserError, naming the member, for a member without two
        axes, and for tensors with different dtypes or devices.
        """
        if not isinstance(x, Tensor):
            if shapes is not None:
                raise UserError("quantize: shapes are for a flat buffer; a tensor for each member has its own")
            shapes, x = Shapes.of([part.shape for part in x]).members, joined(x)
        elif shapes is not None:
            x = _used(x, Shapes.of(shapes))
        options = {"dtype": x.dtype, "source_dtype": source_dtype, "device": x.device, "directions": directions}
        group = cls.empty(x.shape if shapes is None else shapes, quantizer, **options)
        keep = {"key": key, "states": states, "preserve": preserve_high_precision_init_val}
        return group.begin_with(x.view(group.shape), **keep)

    @classmethod
    def of(cls, members: Sequence[HybridQuantizedTensor]) -> Self:
        """Return a copy of the experts' tensors [N, K], to the byte. UserError if they differ in more than their
        values."""
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
        """Return a copy of tensors [m_e, k_e] in one memory, to the byte, in empty()'s shape.

        UserError if they differ in more than values and shapes.
        """
        first = members[0]
        quantizer = homogeneous([member.quantizer for member in members], "grouped tensor: weight")
        for expert, member in enumerate(members):
            if (member.dtype, member.metadata.directions) != (first.dtype, first.metadata.directions):
                got, other = (f"{m.dtype} {m.metadata.directions}" for m in (member, first))
                raise UserError(f"grouped tensor: expert {expert} is {got}, and expert 0 {other}")
        meta = first.metadata
        key = meta.key and replace(meta.key, slot=meta.key.slot.removesuffix("/0"))
        options = {"source_dtype": meta.source_dtype, "directions": meta.directions, "key": key}
        shapes = [member.shape for member in members]
        group = cls.empty(shapes, quantizer, dtype=first.dtype, device=first.device, **options)
        for own, member in zip(group.members, members, strict=True):
            own.write_(member)
        preserved = [member.high_precision_init_val for member in members]
        if all(value is not None for value in preserved):
            group.high_precision_init_val = torch.cat([value.reshape(-1) for value in preserved]).view(group.shape)
        return group

    def reused_for(self, shapes: MemberShapes) -> Self:
        """Return a group of these shapes in the first part of this group's memory; the rest stays unchanged.

        It has no states, and its values are undefined until it is written. UserError if a buffer is too short.
        """
        meta = self.metadata
        fields = {"dtype": self.dtype, "source_dtype": meta.source_dtype, "directions": meta.directions}
        wanted, buffers = type(self).empty(shapes, self.quantizer, device="meta", key=meta.key, **fields), {}
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
        """Number of experts."""
        return self.metadata.content.count

    def own_states(self, states: Any) -> Any:
        """Return the states of the experts that are here, which a shard has some of."""
        return states.numbered(self.metadata.content.first, self.experts)

    @property
    def members(self) -> list[HybridQuantizedTensor]:
        """The tensor [N, K] of each expert: views that share the group's memory, with the expert's states."""
        meta = self.metadata
        operands = {d: getattr(self, d).members for d in meta.directions}
        preserved = self.high_precision_init_val
        if preserved is not None and meta.content.shapes:
            preserved = meta.content.shapes.parts(preserved)
        members = []
        for expert in range(meta.content.count):
            own = {f"{d}_{name}": operands[d][expert].buffers[name] for d, name in meta.stored}
            if preserved is not None:
                own[INIT_VAL] = preserved[expert]
            metadata = meta.member(expert)
            member = HybridQuantizedTensor(own, metadata, metadata.matrix)
            member.states, member.part = self.states and self.states[expert], self.part
            member.shared.writes = self.shared.writes
            members.append(member)
        return members

    def even_part(self, group: ProcessGroup | None) -> Part | None:
        """Return how ranks share each member, for an even shard that cuts no blocks, else None.

        All members of such a shard are quantized in one call.
        """
        if self.sharding is None or group is None or self.part is not None:
            return None
        cut, meta = self.sharding.cut, self.metadata
        part, even = Part(group=group, axis=cut.axis), cut.each * group.size() == cut.shape[cut.dim]
        wanted = {d: "codes" if d in meta.directions else None for d in DIRECTIONS}
        return part if even and is_part(self.quantizer, meta.content.each, part, **wanted) else None

    def encode(self, x: Tensor, key: RngKey | None, part: Part | None) -> HybridOperand:
        """Return the operands of the held directions for values [E, N, K], or flat, in the source dtype.

        part: how ranks share each member.
        """
        meta, states = self.metadata, self.states and [own and own.written() for own in self.states]
        content = meta.content
        x, slots = x.reshape(content.source_shape), {"keys": content.keys(key), "states": states}
        wanted = {d: "codes" if d in meta.directions else None for d in DIRECTIONS}
        with for_slot(self.shared.layer, "weight", self.quantizer, x):
            if part is None:
                return quantize_group(x, content.splits, self.quantizer, **wanted, **slots)
            asked = Wanted(**wanted, **slots, by_rows=False)
            return quantize_group_part(self.quantizer, x, content.splits, part, asked)


def _used(x: Tensor, shapes: Shapes) -> Tensor:
    """Return the part of a buffer that members of these shapes use."""
    if x.numel() < shapes.total:
        raise UserError(f"a buffer of {x.numel()} elements for members of {shapes.total}")
    return x.reshape(-1)[: shapes.total]


def _experts(x: GroupedTensor, dim: int, operation: str) -> None:
    """Raise UserError unless the axis counts experts."""
    content = x.metadata.content
    if content.shapes:
        refuse_unlike(content.members, f"{operation} of a group", instead="; take its members, or use dequantize()")
    if x.dim() != AXES or dim not in (0, -AXES):
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
    """Return the experts start to end, as views."""
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
        buffers[f"{direction}_{name}"] = flat.view(x.experts, -1)[start:stop].view(-1)
    if x.high_precision_init_val is not None:
        buffers[INIT_VAL] = x.high_precision_init_val[start:stop]
    matrix, first = (count * x.shape[1], x.shape[2]), meta.content.first + start
    part = x.view_of(buffers, (count, *x.shape[1:]), content=ManyMatrices(matrix=matrix, count=count, first=first))
    part.states, part.part = x.states and x.states[start:stop], x.part
    return part


def _split(x: GroupedTensor, size: int, dim: int = 0) -> list[GroupedTensor]:
    """Return parts with `size` experts each, as views; or shards with `size` rows or columns of every expert, as
    copies."""
    cut = Cut.of(x.metadata, x.shape, size, dim)
    if cut.of_experts:
        parts = [_slice(x, dim, start, start + size) for start in range(0, x.shape[dim], size)]
    else:
        of_members = [member.split(size, cut.dim - 1) for member in x.members]
        parts = [_shard(x, cut, *each) for each in enumerate(zip(*of_members, strict=True))]
    return with_sharding(x, parts, cut)


def _shard(x: GroupedTensor, cut: Cut, rank: int, members: Sequence[HybridQuantizedTensor]) -> GroupedTensor:
    """Return the shard of rank `rank`, made from the shards of its members."""
    (start, stop), buffers = cut.span(rank), {}
    for direction, name in x.metadata.stored:
        turned = stored_by_rows(getattr(x.quantizer, direction), direction == "columnwise")
        own = [getattr(member, direction).buffers[name] for member in members]
        buffers[f"{direction}_{name}"] = torch.cat([(part.t() if turned else part).reshape(-1) for part in own])
    if x.high_precision_init_val is not None:
        buffers[INIT_VAL] = torch.stack([member.high_precision_init_val for member in members])
    # A write into this copy would not reach the whole.
    metadata = replace(cut.part(start, stop), key=x.metadata.key, shares_scale=True)
    shard = type(x)(buffers, metadata, cut.shape_of(stop - start))
    shard.states, shard.part = x.states, x.part
    return shard


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
