"""GroupedTensor: the weights of all experts as one parameter [E, N, K], held as their quantized operands.

Every expert is quantized by itself, with scales, random bits and states of its own; members are views of the packed
buffers, so that writing to one writes to the group. What holds for a HybridQuantizedTensor holds here, with the first
axis counting experts: it can be cut between experts only, and one expert is a HybridQuantizedTensor [N, K].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, RngKeys
from hqsweep.ops.grouped_layout import GroupLayout, Splits
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.grouped_operand import GroupedOperand, HybridGroup, quantize_group
from hqsweep.quant.homogeneous import homogeneous
from hqsweep.quant.metadata import Metadata
from hqsweep.quant.tensor import INIT_VAL, HybridQuantizedTensor

aten = torch.ops.aten
AXES = 3


@dataclass(frozen=True, kw_only=True)
class GroupMetadata(Metadata):
    """That of a group; matrix is [E * N, K], and buffers are flat."""

    experts: int
    first: int = 0
    """Which expert of the whole is the first one of this part."""

    @property
    def member(self) -> Metadata:
        """That of one expert, without its key."""
        facts = {name: getattr(self, name) for name in ("quantizer", "directions", "dtype", "source_dtype")}
        return Metadata(matrix=(self.matrix[0] // self.experts, self.matrix[1]), **facts)

    def buffer(self, direction: str, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape = self.member.buffer(direction, name)
        return dtype, (self.experts * math.prod(shape),)

    def key_of(self, expert: int) -> RngKey | None:
        """The stream of one expert."""
        return self.key and self.key.under(str(self.first + expert))

    def keys(self, key: RngKey | None) -> RngKeys | None:
        """key_of every expert under this key of the group."""
        if key is None:
            return None
        slots = tuple(key.under(str(self.first + expert)).slot for expert in range(self.experts))
        return RngKeys(seed=key.seed, slots=slots, step=key.step)

    def operand(self, buffers: Mapping[str, Tensor], direction: str) -> GroupedOperand | None:
        if direction not in self.directions:
            return None
        own = {name: buffers[f"{d}_{name}"] for d, name in self.stored if d == direction}
        own = own or {"q": buffers["rowwise_q"]}  # an identity, which both directions read
        rows, cols = self.matrix
        splits = Splits.uniform(self.experts, rows // self.experts)
        layout = GroupLayout(splits=splits, width=cols, columnwise=direction == "columnwise")
        return GroupedOperand(
            format=getattr(self.quantizer, direction), layout=layout, dtype=self.source_dtype, buffers=own
        )

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"experts": self.experts, "first": self.first}

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> "GroupMetadata":
        plain = Metadata.parse(described)
        return cls(**vars(plain), experts=described["experts"], first=described["first"])


class GroupedTensor(HybridQuantizedTensor):
    """The operands of `quantizer` for each expert of a tensor [E, N, K]; make it with quantize(), empty() or of().

    rowwise encodes each [N, K], columnwise its transpose. The key of random bits is that of the group, and "/e" is
    added to its slot for expert e, as a role with an expert has it.
    """

    rowwise: GroupedOperand | None
    columnwise: GroupedOperand | None
    states: Sequence[SlotStates | None] | None
    """Of each expert."""
    metadata_type = GroupMetadata

    @classmethod
    def takes(cls, shape: Sequence[int]) -> bool:
        """Whether it is [experts, rows, columns]."""
        return len(shape) == AXES and shape[0] > 0

    @classmethod
    def metadata_of(cls, shape: Sequence[int], **facts: Any) -> GroupMetadata:
        if not cls.takes(shape):
            raise UserError(f"a grouped tensor is [experts, rows, columns], not of shape {tuple(shape)}")
        return GroupMetadata(matrix=(shape[0] * shape[1], shape[2]), experts=shape[0], **facts)

    @classmethod
    def of(cls, members: Sequence[HybridQuantizedTensor]) -> Self:
        """A copy of the experts' tensors [N, K], to the byte; UserError where they differ in more than their values."""
        first = members[0]
        quantizer = homogeneous([member.quantizer for member in members], "grouped tensor: weight")
        for expert, member in enumerate(members):
            if (member.shape, member.dtype, member.metadata.directions) != (
                first.shape, first.dtype, first.metadata.directions,
            ):  # fmt: skip
                got, other = (f"{tuple(m.shape)} {m.dtype} {m.metadata.directions}" for m in (member, first))
                raise UserError(f"grouped tensor: expert {expert} is {got}, and expert 0 {other}")
        meta = first.metadata
        made = cls.empty(
            (len(members), *first.shape), quantizer, dtype=first.dtype, source_dtype=meta.source_dtype,
            device=first.device, directions=meta.directions,
            key=meta.key and replace(meta.key, slot=meta.key.slot.removesuffix("/0")),
        )  # fmt: skip
        for own, member in zip(made.members, members, strict=True):
            own.write_(member)
        preserved = [member.high_precision_init_val for member in members]
        if all(value is not None for value in preserved):
            made.high_precision_init_val = torch.stack(preserved)
        return made

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.metadata.experts

    @property
    def members(self) -> list[HybridQuantizedTensor]:
        """The tensor of each expert [N, K]: views, which share memory with the group, and its states."""
        meta = self.metadata
        operands = {d: getattr(self, d).members for d in meta.directions}
        made = []
        for expert in range(meta.experts):
            own = {f"{d}_{name}": operands[d][expert].buffers[name] for d, name in meta.stored}
            if self.high_precision_init_val is not None:
                own[INIT_VAL] = self.high_precision_init_val[expert]
            facts = replace(meta.member, key=meta.key_of(expert))
            member = HybridQuantizedTensor(own, facts, facts.matrix)
            member.states = self.states and self.states[expert]
            made.append(member)
        return made

    def operands_of(self, matrix: Tensor, wanted: Mapping[str, Any], key: RngKey | None) -> HybridGroup:
        splits = Splits.uniform(self.experts, matrix.shape[0] // self.experts)
        keys = self.metadata.keys(key)
        states = self.states and [state and replace(state, record=True, held=True) for state in self.states]
        return quantize_group(matrix, splits, self.quantizer, **wanted, keys=keys, states=states)

    def values(self, dtype: torch.dtype) -> Tensor:
        if self.rowwise is not None:
            parts = [member.dequantize(dtype) for member in self.rowwise.members]
        else:
            parts = [member.dequantize(dtype).t() for member in self.columnwise.members]
        return torch.stack(parts).view(self.shape)


def _experts(x: GroupedTensor, dim: int, operation: str) -> None:
    """UserError unless the axis is the one of experts."""
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
