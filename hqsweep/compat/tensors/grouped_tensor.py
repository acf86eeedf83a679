"""GroupedTensor by TransformerEngine's name: matrices in one memory, plain or quantized by one quantizer.

A quantized group holds the GroupedTensor of hqsweep.quant as `quantized`, whose members are the tensors. The weights of
experts are such tensors themselves, and are instances of this class, too.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.compat.modules.activation_dtype import quantizer_in
from hqsweep.compat.quantizer import Quantizer, te_device_type
from hqsweep.errors import UserError
from hqsweep.quant import GroupedTensor as Quantized
from hqsweep.quant.hybrid import DIRECTIONS, Direction

Shape = tuple[int, int]


class _Grouped(type):
    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, Quantized) or super().__instancecheck__(group)


class GroupedTensor(metaclass=_Grouped):
    """Matrices [m_e, k_e] in one memory: float [sum of m_e * k_e] without a quantizer, else codes and scales."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, plain: Tensor | None) -> None:
        self.tensor_shapes, self.dtype, self.plain = list(shapes), dtype, plain
        self.quantizer: Quantizer | None = None
        self.quantized: Quantized | None = None

    @classmethod
    def make_grouped_tensor_with_shapes(
        cls,
        num_tensors: int,
        shapes: Sequence[Shape],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A group with uninitialised memory; dtype: float32 by default. UserError for shapes of another number, and for
        one that the format cannot hold."""
        if len(shapes) != num_tensors:
            raise UserError(f"GroupedTensor: {len(shapes)} shapes for {num_tensors} tensors; give one for each")
        shapes, device = [tuple(shape) for shape in shapes], device or te_device_type()
        dtype = dtype or torch.float32
        if quantizer is None:
            return cls(shapes, dtype, torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device))
        group = cls(shapes, dtype, None)
        group.quantizer, frozen = quantizer, quantizer_in(quantizer._of_call(), dtype)
        options = {"dtype": dtype, "device": device, "directions": quantizer._directions() or DIRECTIONS}
        group.quantized = Quantized.empty(shapes, frozen, **options)
        return group

    def quantize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write one tensor [m_e, k_e] to each member, and return the members. UserError without a quantizer, and for
        another number of tensors."""
        members = self.split_into_quantized_tensors()
        if self.quantizer is None:
            raise UserError("GroupedTensor: quantize() of a group without a quantizer; copy_() to its members")
        if len(tensors) != len(members):
            raise UserError(f"GroupedTensor: {len(tensors)} tensors for {len(members)} members; give one for each")
        for member, tensor in zip(members, tensors, strict=True):
            self.quantizer.update_quantized(tensor, member)
        return members

    def split_into_quantized_tensors(self) -> list[Tensor]:
        """The members, as views of the memory of the group."""
        if self.quantized is not None:
            return list(self.quantized.members)
        sizes = [math.prod(shape) for shape in self.tensor_shapes]
        parts = [] if self.plain is None else self.plain.split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.tensor_shapes, strict=True)]

    @property
    def num_tensors(self) -> int:
        """The number of members."""
        return len(self.tensor_shapes)

    @property
    def logical_shape(self) -> Shape:
        """The members below each other, or side by side if only that is possible, or [1, all elements]."""
        rows, cols = [shape[0] for shape in self.tensor_shapes], [shape[1] for shape in self.tensor_shapes]
        if self.all_same_last_dim():
            return sum(rows), max(cols, default=0)
        return (rows[0], sum(cols)) if self.all_same_first_dim() else (1, sum(map(math.prod, self.tensor_shapes)))

    def all_same_first_dim(self) -> bool:
        """Whether all members have equally many rows."""
        return len({shape[0] for shape in self.tensor_shapes}) <= 1

    def all_same_last_dim(self) -> bool:
        """Whether all members have equally many columns."""
        return len({shape[1] for shape in self.tensor_shapes}) <= 1

    def all_same_shape(self) -> bool:
        """Whether all members have one shape."""
        return len(set(self.tensor_shapes)) <= 1

    def get_common_first_dim(self) -> int:
        """The rows of every member. UserError if they differ."""
        return self._common(0, "rows")

    def get_common_last_dim(self) -> int:
        """The columns of every member. UserError if they differ."""
        return self._common(1, "columns")

    def has_data(self) -> bool:
        """Whether it holds memory."""
        return self.plain is not None or self.quantized is not None

    def clear(self) -> None:
        """Drop members and memory."""
        self.tensor_shapes, self.plain, self.quantized = [], None, None

    @property
    def rowwise_data(self) -> Tensor | None:
        """The values, or all rowwise codes, flat; None where they are not held."""
        return self._buffer("rowwise", "q") if self.plain is None else self.plain

    @property
    def columnwise_data(self) -> Tensor | None:
        """All columnwise codes, flat; None where they are not held."""
        return self._buffer("columnwise", "q")

    @property
    def scale_inv(self) -> Tensor | None:
        """All rowwise scales, flat; None where they are not held."""
        return self._buffer("rowwise", "s")

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """All columnwise scales, flat; None where they are not held."""
        return self._buffer("columnwise", "s")

    @property
    def scale(self) -> Tensor | None:
        """The scale of a Float8Quantizer; None for others."""
        return getattr(self.quantizer, "scale", None)

    def _common(self, axis: int, what: str) -> int:
        sizes = {shape[axis] for shape in self.tensor_shapes}
        if len(sizes) != 1:
            raise UserError(f"GroupedTensor: its {self.num_tensors} members have {sorted(sizes)} {what}")
        return sizes.pop()

    def _buffer(self, direction: Direction, name: str) -> Tensor | None:
        operand = None if self.quantized is None else getattr(self.quantized, direction)
        return None if operand is None else operand.buffers.get(name)
