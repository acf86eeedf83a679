"""The description of a quantized tensor apart from buffers and shape. It says which buffers the tensor has."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.wire.exchange import Area
from hqsweep.quant.content import Content, parse_content
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The description of a quantized tensor. It is frozen and hashable, so a compiler can guard it.

    Buffers are named "rowwise_q" and so on.
    """

    quantizer: HybridQuantizer
    directions: tuple[str, ...]
    """The held directions: "rowwise", "columnwise", or both."""
    content: Content
    """The encoded matrix, or matrices."""
    dtype: torch.dtype
    """dtype of the logical tensor, of dequantize() and of gradients."""
    source_dtype: torch.dtype
    """Values are rounded to this dtype before they are quantized."""
    key: RngKey | None = None
    """The key of the last quantization, for stochastic rounding; a group has one for all members."""
    place: Place | None = None
    """The place of a shard in its whole weight, or of each member in its own whole; None: it is the whole."""
    shares_scale: bool = False
    """Whether this part shares entries with the rest of its tensor, such as a scale, and so cannot be written."""

    @classmethod
    def of(
        cls,
        content: Content,
        quantizer: HybridQuantizer,
        *,
        dtype: torch.dtype = torch.bfloat16,
        source_dtype: torch.dtype | None = None,
        directions: Sequence[str] = DIRECTIONS,
        key: RngKey | None = None,
        place: Place | None = None,
    ) -> "Metadata":
        """Return the metadata of a new tensor. The key is kept only if random bits are drawn.

        UserError for missing or unknown directions, and for a shard outside its whole.
        """
        if not directions or not set(directions) <= set(DIRECTIONS):
            raise UserError(f"directions are {tuple(directions)}; allowed: {', '.join(DIRECTIONS)}, or both")
        if place is not None:
            content.check_shard()
            place.area(content.each)
        return cls(
            quantizer=quantizer,
            directions=tuple(d for d in DIRECTIONS if d in directions),
            content=content,
            dtype=dtype,
            source_dtype=source_dtype or dtype,
            key=key if quantizer.stochastic else None,
            place=place,
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the encoded content as one matrix."""
        return self.content.matrix

    @property
    def stored(self) -> list[tuple[str, str]]:
        """(direction, buffer) of each held buffer. One matrix serves both directions of an identity."""
        q = self.quantizer
        one = q.rowwise.high_precision and q.rowwise == q.columnwise
        held = self.directions[:1] if one else self.directions
        return [(direction, name) for direction in held for name in getattr(q, direction).layout]

    def cover(self, direction: str) -> Area:
        """Return the rows and columns of the whole that this direction of a shard encodes."""
        return self.place.cover_area(getattr(self.quantizer, direction), direction, self.content.each)

    def _encoded(self, direction: str) -> Content:
        """Return the content that the direction's operand encodes: the tensor's, or a shard's cover."""
        return self.content if self.place is None else self.content.of_each(self.cover(direction).shape)

    def buffer(self, direction: str, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of one buffer. UserError for a shape that the format cannot hold."""
        format = getattr(self.quantizer, direction)
        return format.layout[name].dtype, self._encoded(direction).buffer_shape(format, name, direction)

    def empty(self, device: torch.device | str) -> dict[str, Tensor]:
        """Return uninitialised buffers. UserError for a shape that a format cannot hold."""
        buffers = {}
        whole = self.content if self.place is None else self.content.of_each(self.place.whole)
        for direction in self.directions:
            whole.check(getattr(self.quantizer, direction), direction)
        for direction, name in self.stored:
            dtype, shape = self.buffer(direction, name)
            buffers[f"{direction}_{name}"] = torch.empty(shape, dtype=dtype, device=device)
        return buffers

    def check(self, buffers: Mapping[str, Tensor]) -> None:
        """Raise UserError for missing buffers, and for buffers whose shape or dtype differs from the formats'
        layout."""
        for direction, name in self.stored:
            wanted = self.buffer(direction, name)
            tensor = buffers.get(f"{direction}_{name}")
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != wanted:
                got = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise UserError(
                    f"buffer {direction}_{name} of a tensor in {self.quantizer} is {got}; it takes {wanted[0]}"
                    f" {wanted[1]}"
                )

    def operand(self, buffers: Mapping[str, Tensor], direction: str) -> Operand | None:
        """Return the operand of one direction, or None if it is not held."""
        if direction not in self.directions:
            return None
        own = {name: buffers[f"{d}_{name}"] for d, name in self.stored if d == direction}
        own = own or {"q": self.content.turned(buffers["rowwise_q"])}  # an identity is stored once
        format, fields = getattr(self.quantizer, direction), self._encoded(direction).operand_fields(direction)
        return Operand(format=format, **fields, dtype=self.source_dtype, buffers=own)

    def decode(self, rowwise: Operand | None, columnwise: Operand | None, dtype: torch.dtype) -> Tensor:
        """Return new memory with the values, from the rowwise operand if it is held; for a shard without the rest of
        its cover."""
        if self.place is None:
            return self.content.decode(rowwise, columnwise, dtype)
        direction = "columnwise" if rowwise is None else "rowwise"
        cover, own = self.cover(direction), self.place.area(self.content.each)
        values = self._encoded(direction).decode(rowwise, columnwise, dtype)
        return values if cover == own else own.of(values, cover).clone()

    def member(self, index: int) -> "Metadata":
        """Return the metadata of one member of a group."""
        return replace(self, content=self.content.member(index), key=self.content.key_of(self.key, index))

    def describe(self) -> dict[str, Any]:
        """Return text and numbers from which parse() makes an equal value."""
        key = self.key
        return {
            "quantizer": str(self.quantizer),
            "directions": list(self.directions),
            "matrix": list(self.matrix),
            "dtype": str(self.dtype).removeprefix("torch."),
            "source_dtype": str(self.source_dtype).removeprefix("torch."),
            "key": key and [key.seed, key.slot, key.step],
            "shares_scale": self.shares_scale,
            **({} if self.place is None else {"place": list(astuple(self.place))}),
            **self.content.describe(),
        }

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> "Metadata":
        """Return the inverse of describe(). UserError for a quantizer that does not parse."""
        key = described["key"]
        return cls(
            quantizer=HybridQuantizer.parse(described["quantizer"]),
            directions=tuple(described["directions"]),
            content=parse_content(described),
            dtype=getattr(torch, described["dtype"]),
            source_dtype=getattr(torch, described["source_dtype"]),
            key=key and RngKey(seed=key[0], slot=key[1], step=key[2]),
            shares_scale=described["shares_scale"],
            place=Place(*described["place"]) if "place" in described else None,
        )
