"""The content of a quantized tensor: one matrix, or a group of matrices (members).

Both classes have the same interface, so that a tensor and its metadata need not distinguish them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey, RngKeys
from hqsweep.ops.layout import GroupLayout, Layout, Shapes, refuse_unlike
from hqsweep.ops.splits import Splits
from hqsweep.quant.operand import Operand

AXES = 3
"""Axes of the weights [E, N, K] of all experts."""
MemberShapes = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class OneMatrix:
    """A tensor [..., cols] as one matrix, with leading axes folded. A tensor of one axis or of none is one row."""

    matrix: tuple[int, int]
    splits: ClassVar[None] = None
    """None: there are no members."""

    @classmethod
    def of(cls, shape: Sequence[int]) -> tuple[Self, Sequence[int]]:
        """Return the content of a tensor with this shape, and the shape."""
        return cls(matrix=(torch.Size(shape[:-1]).numel(), shape[-1] if len(shape) else 1)), shape

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> Self:
        """Return the content that Metadata.describe() wrote."""
        return cls(matrix=tuple(described["matrix"]))

    def describe(self) -> dict[str, Any]:
        """Return the entries of Metadata.describe() besides the matrix."""
        return {}

    @property
    def each(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.matrix

    def of_each(self, shape: tuple[int, int]) -> Self:
        """Return the content of a matrix with this shape."""
        return replace(self, matrix=shape)

    @property
    def extent(self) -> tuple:
        """Equal for two tensors of one quantizer if one can take the other's bytes."""
        return (self.matrix,)

    def empty_shape(self, size: Sequence[int]) -> Sequence[int] | None:
        """Return empty()'s argument for a tensor of this size; None if a plain tensor is meant, of fewer axes."""
        return size if len(size) >= 2 else None

    def shape(self, direction: str) -> tuple[int, int]:
        """Return the shape of the matrix that the direction's operand encodes."""
        rows, cols = self.matrix
        return (rows, cols) if direction == "rowwise" else (cols, rows)

    def check_shard(self) -> None:
        """Accept: one matrix can be a shard."""

    def check(self, format: Format, direction: str) -> None:
        """Raise UserError for a shape that the format cannot hold."""
        format.check_shape(*self.shape(direction))

    def check_view(self, shape: Sequence[int]) -> None:
        """Accept: every logical shape with equally many elements is valid."""

    def buffer_shape(self, format: Format, name: str, direction: str) -> tuple[int, ...]:
        """Return the shape of one buffer. UserError for a matrix that the format cannot hold."""
        return format.shapes(*self.shape(direction))[name]

    def operand_fields(self, direction: str) -> dict[str, Any]:
        """Return the Operand fields that describe the contents of the direction's buffers."""
        return {"shape": self.shape(direction)}

    def turned(self, identity: Tensor) -> Tensor:
        """Return the columnwise buffer of an identity that stores only the rowwise buffer."""
        return identity.t()

    def joined(self, parts: Sequence[Tensor]) -> NoReturn:
        """Raise UserError: one matrix is written from one tensor."""
        raise UserError(f"quantize_: got {len(parts)} tensors for one matrix {list(self.matrix)}; give one tensor")

    def decode(self, rowwise: Operand | None, columnwise: Operand | None, dtype: torch.dtype) -> Tensor:
        """Return new memory with the values [rows, cols], from the rowwise operand if it is held."""
        if rowwise is None:
            return columnwise.dequantize(dtype).t().contiguous()
        values = rowwise.dequantize(dtype)
        return values.clone() if rowwise.format.high_precision else values


@dataclass(frozen=True, kw_only=True)
class ManyMatrices:
    """The members of a group, each encoded by itself. Every buffer is flat and holds all members."""

    matrix: tuple[int, int]
    """[E * N, K] for members [N, K], or [1, elements] for members of different shapes."""
    count: int
    first: int = 0
    """This part's first expert, as a number in the whole."""
    shapes: Shapes | None = None
    """The members' shapes; None if all are [N, K]."""

    @classmethod
    def of(cls, shape: Sequence[int] | MemberShapes) -> tuple[Self, Sequence[int]]:
        """Return the content and the logical shape of a tensor [E, N, K], or of members with these shapes.

        The tensor is flat if members differ in shape. UserError for other arguments.
        """
        if len(shape) and isinstance(shape[0], Sequence):
            shapes = Shapes.of(shape)
            if not shapes.equal:
                return cls(matrix=(1, shapes.total), count=shapes.count, shapes=shapes), (shapes.total,)
            shape = (shapes.count, *shapes.equal)
        if not cls._has_experts(shape):
            raise UserError(f"a grouped tensor is [experts, rows, columns], not of shape {tuple(shape)}")
        return cls(matrix=(shape[0] * shape[1], shape[2]), count=shape[0]), shape

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> Self:
        """Return the content that Metadata.describe() wrote."""
        shapes = Shapes.of(described["shapes"]) if "shapes" in described else None
        matrix, count = tuple(described["matrix"]), described["experts"]
        return cls(matrix=matrix, count=count, first=described["first"], shapes=shapes)

    def describe(self) -> dict[str, Any]:
        """Return the entries of Metadata.describe() besides the matrix."""
        shapes = {"shapes": [list(shape) for shape in self.shapes.members]} if self.shapes else {}
        return {"experts": self.count, "first": self.first} | shapes

    @staticmethod
    def _has_experts(shape: Sequence[int]) -> bool:
        return len(shape) == AXES and shape[0] > 0

    def part(self, start: int, stop: int) -> Self:
        """Return the content of the experts start to stop, which have equal shapes."""
        rows, cols = self.each
        return replace(self, matrix=((stop - start) * rows, cols), count=stop - start, first=self.first + start)

    @property
    def extent(self) -> tuple:
        """Equal for two tensors of one quantizer if one can take the other's bytes."""
        return self.count, self.matrix, self.shapes

    @property
    def splits(self) -> Splits | Shapes:
        """The rows of each member in the matrix."""
        return self.shapes or Splits.uniform(self.count, self.each[0])

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape in which quantize_group takes the values: the matrix, or flat."""
        return (self.shapes.total,) if self.shapes else self.matrix

    @property
    def members(self) -> list[tuple[int, int]]:
        """The shape of each member."""
        return list(self.shapes.members) if self.shapes else [self.each] * self.count

    def member(self, index: int) -> OneMatrix:
        """Return the content of one member."""
        return OneMatrix(matrix=self.shapes.members[index] if self.shapes else self.each)

    @property
    def each(self) -> tuple[int, int]:
        """The members' common shape."""
        return self.matrix[0] // max(self.count, 1), self.matrix[1]

    def of_each(self, shape: tuple[int, int]) -> Self:
        """Return the content of equally many members with this shape."""
        return replace(self, matrix=(self.count * shape[0], shape[1]))

    def empty_shape(self, size: Sequence[int]) -> Sequence[Any] | None:
        """Return empty()'s argument for a tensor of this size; None if this content cannot have the size."""
        if self.shapes and tuple(size) == (self.shapes.total,):
            return self.shapes.members
        return size if self._has_experts(size) else None

    def layout(self, direction: str) -> Layout:
        """Return the layout of the members' operands in packed buffers."""
        columnwise = direction == "columnwise"
        if self.shapes:
            return self.shapes.layout(columnwise=columnwise)
        return GroupLayout(splits=self.splits, width=self.matrix[1], columnwise=columnwise)

    def check_shard(self) -> None:
        """Raise UserError for members of several shapes, which cannot be sharded: a place applies to the matrix of
        every member."""
        if self.shapes:
            refuse_unlike(self.shapes.members, "a shard of a group", instead="; its members are whole")

    def check(self, format: Format, direction: str) -> None:
        """Raise UserError, naming the member, for a shape that the format cannot hold."""
        if self.shapes:
            self.layout(direction).check(format)
        else:
            OneMatrix(matrix=self.matrix).check(format, direction)

    def check_view(self, shape: Sequence[int]) -> None:
        """Raise UserError for a view of a flat group in another shape."""
        if self.shapes and tuple(shape) != (self.shapes.total,):
            instead = "; it is flat, or take its members"
            refuse_unlike(self.shapes.members, f"a view {list(shape)} of a group", instead=instead)

    def buffer_shape(self, format: Format, name: str, direction: str) -> tuple[int, ...]:
        """Return the shape of one buffer. UserError for members that the format cannot hold."""
        if self.shapes:
            return (sum(map(math.prod, self.layout(direction).buffer_shapes(format, name))),)
        return (self.count * math.prod(self.member(0).buffer_shape(format, name, direction)),)

    def operand_fields(self, direction: str) -> dict[str, Any]:
        """Return the Operand fields that describe the contents of the direction's buffers."""
        return {"layout": self.layout(direction)}

    def turned(self, identity: Tensor) -> Tensor:
        """Return the columnwise buffer of an identity, which is the rowwise buffer."""
        return identity

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor per member, concatenated flat. UserError for tensors of other shapes."""
        shapes = [tuple(part.shape) for part in parts]
        if shapes != self.members:
            raise UserError(f"quantize_: got tensors of shapes {shapes} for members of shapes {self.members}")
        return joined(parts)

    def key_of(self, key: RngKey | None, member: int) -> RngKey | None:
        """Return one member's stream under the group's key."""
        return key and key.under(str(self.first + member))

    def keys(self, key: RngKey | None) -> RngKeys | None:
        """Return all members' streams under the group's key."""
        if key is None:
            return None
        slots = tuple(self.key_of(key, member).slot for member in range(self.count))
        return RngKeys(seed=key.seed, slots=slots, step=key.step, counter=key.counter)

    def decode(self, rowwise: Operand | None, columnwise: Operand | None, dtype: torch.dtype) -> Tensor:
        """Return new memory with the values, [E, N, K] or flat, from the rowwise operand if it is held."""
        if rowwise is not None:
            parts = [member.dequantize(dtype) for member in rowwise.members]
        else:
            parts = [member.dequantize(dtype).t() for member in columnwise.members]
        if not parts:
            return next(iter((rowwise or columnwise).buffers.values())).new_empty((0, *self.each), dtype=dtype)
        return torch.cat([part.reshape(-1) for part in parts]) if self.shapes else torch.stack(parts)


Content = OneMatrix | ManyMatrices


def parse_content(described: Mapping[str, Any]) -> Content:
    """Return the content that Metadata.describe() wrote."""
    return (ManyMatrices if "experts" in described else OneMatrix).parse(described)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensors concatenated flat. UserError, naming the first fault, unless all have one dtype and device."""
    first = parts[0]
    for member, part in enumerate(parts):
        if (part.dtype, part.device) != (first.dtype, first.device):
            got, other = (f"{x.dtype} on {x.device}" for x in (part, first))
            raise UserError(f"member {member} of a group is {got}, and member 0 {other}")
    return torch.cat([part.reshape(-1) for part in parts])
