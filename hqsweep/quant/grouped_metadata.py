"""What a GroupedTensor is beside its buffers and its shape, and which buffers that takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hqsweep.formats import RngKey, RngKeys
from hqsweep.ops.layout import GroupLayout, Layout
from hqsweep.ops.shapes import Shapes
from hqsweep.ops.splits import Splits
from hqsweep.quant.metadata import Metadata
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True)
class GroupMetadata(Metadata):
    """That of a group, whose buffers are flat. matrix is [E * N, K], or [1, elements] of members of other shapes."""

    experts: int
    first: int = 0
    """Which expert of the whole is the first one of this part."""
    shapes: Shapes | None = None
    """None where all members have the shape [N, K]."""

    @property
    def extent(self) -> tuple:
        return self.experts, self.matrix, self.shapes

    @property
    def splits(self) -> Splits | Shapes:
        """Where the members are in the matrix."""
        return self.shapes or Splits.uniform(self.experts, self.matrix[0] // self.experts)

    @property
    def member_shapes(self) -> list[tuple[int, int]]:
        """Of each expert."""
        return list(self.shapes.members) if self.shapes else [self._equal] * self.experts

    @property
    def _equal(self) -> tuple[int, int]:
        return self.matrix[0] // self.experts, self.matrix[1]

    def member(self, expert: int) -> Metadata:
        """That of one expert."""
        facts = {name: getattr(self, name) for name in ("quantizer", "directions", "dtype", "source_dtype")}
        matrix = self.shapes.members[expert] if self.shapes else self._equal
        return Metadata(matrix=matrix, key=self.key_of(expert), **facts)

    def layout(self, direction: str) -> Layout:
        """Of the members' operands in packed buffers."""
        columnwise = direction == "columnwise"
        if self.shapes:
            return self.shapes.layout(columnwise=columnwise)
        return GroupLayout(splits=self.splits, width=self.matrix[1], columnwise=columnwise)

    def check_shape(self, direction: str) -> None:
        if self.shapes:
            self.layout(direction).check(getattr(self.quantizer, direction))
        else:
            super().check_shape(direction)

    def buffer(self, direction: str, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if self.shapes is None:
            dtype, shape = self.member(0).buffer(direction, name)
            return dtype, (self.experts * math.prod(shape),)
        format, layout = getattr(self.quantizer, direction), self.layout(direction)
        return format.layout[name].dtype, (sum(map(math.prod, layout.buffer_shapes(format, name))),)

    def key_of(self, expert: int) -> RngKey | None:
        """The stream of one expert."""
        return self.key and self.key.under(str(self.first + expert))

    def keys(self, key: RngKey | None) -> RngKeys | None:
        """key_of every expert under this key of the group."""
        if key is None:
            return None
        slots = tuple(key.under(str(self.first + expert)).slot for expert in range(self.experts))
        return RngKeys(seed=key.seed, slots=slots, step=key.step)

    def operand(self, buffers: Mapping[str, Tensor], direction: str) -> Operand | None:
        if direction not in self.directions:
            return None
        own = {name: buffers[f"{d}_{name}"] for d, name in self.stored if d == direction}
        own = own or {"q": buffers["rowwise_q"]}  # an identity, which both directions read
        format, layout = getattr(self.quantizer, direction), self.layout(direction)
        return Operand(format=format, layout=layout, dtype=self.source_dtype, buffers=own)

    def describe(self) -> dict[str, Any]:
        shapes = {"shapes": [list(shape) for shape in self.shapes.members]} if self.shapes else {}
        return super().describe() | {"experts": self.experts, "first": self.first} | shapes

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> "GroupMetadata":
        plain = Metadata.parse(described)
        shapes = Shapes.of(described["shapes"]) if "shapes" in described else None
        return cls(**vars(plain), experts=described["experts"], first=described["first"], shapes=shapes)
