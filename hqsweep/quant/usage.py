"""The buffers of a quantized tensor: their description, and the directions that they hold.

Metadata describes a tensor apart from buffers and shape. It says which buffers the tensor has.

Directions are read apart, saved, or dropped, also by TransformerEngine's names. A tensor without any operand, after
clear() or prepare_for_saving(), keeps its shape, dtype and formats. Reading and writing it raise UserError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, RngKey
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.wire.exchange import Area
from hqsweep.quant.content import Content, parse_content
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
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


class NotHeld(UserError, RuntimeError):
    """A direction is asked of a tensor that does not hold it. It is a RuntimeError, as in TransformerEngine."""


class Directions:
    """The part of HybridQuantizedTensor that knows its two directions."""

    alone: dict[str, Any]
    """Direction -> its sub-storage, once one was asked for."""

    def drop(self, direction: Direction) -> Self:
        """Drop one direction in place, and return self. Its memory is freed once no view holds it.

        Later writes make only the other direction, with the same bytes. A product that reads the dropped direction
        raises UserError. A direction that is not held changes nothing. UserError for the only direction, and for an
        unknown one.
        """
        if direction not in DIRECTIONS:
            raise UserError(f"drop: direction is '{direction}'; allowed: {', '.join(DIRECTIONS)}")
        if direction not in self.metadata.directions:
            return self
        if len(self.metadata.directions) == 1:
            raise UserError(f"drop: {direction} is the only direction that this tensor in {self.quantizer} holds")
        [other] = (held for held in DIRECTIONS if held != direction)
        buffers = {name: buffer.contiguous() for name, buffer in self._buffers_of(other).items()}
        for held, name in self.metadata.stored:
            delattr(self, f"{held}_{name}")
        self._metadata = replace(self.metadata, directions=(other,))
        self.hold(buffers)
        return self

    @property
    def rowwise_sub_storage(self) -> Self | None:
        """The rowwise direction alone, as a view of the same memory; None if it is not held."""
        return self._alone("rowwise")

    @property
    def columnwise_sub_storage(self) -> Self | None:
        """The columnwise direction alone, as a view of the same memory; None if it is not held."""
        return self._alone("columnwise")

    def get_usages(self) -> dict[str, bool]:
        """Return direction -> whether it is held."""
        return {direction: getattr(self, direction) is not None for direction in DIRECTIONS}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the directions that are False; None leaves a direction as it is.

        UserError, before anything is dropped, for a missing direction that is True.
        """
        wanted, held = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}, self.get_usages()
        missing = [direction for direction in DIRECTIONS if wanted[direction] and not held[direction]]
        if missing:
            raise NotHeld(
                f"update_usage: {missing[0]} usage is asked of a tensor in {self.quantizer} that holds no {missing[0]}"
                " sub-storage; quantize the values again"
            )
        dropped = [direction for direction in DIRECTIONS if held[direction] and wanted[direction] in (False, 0)]
        if len(dropped) == sum(held.values()):
            self.clear()
        else:
            for direction in dropped:
                self.drop(direction)

    def clear(self) -> None:
        """Drop all operands. Their memory is freed once no view holds it."""
        for direction, name in self.metadata.stored:
            setattr(self, f"{direction}_{name}", None)
        self.rowwise, self.columnwise, self.alone = None, None, {}

    def prepare_for_saving(self) -> tuple[list[Tensor], Self]:
        """Return the buffers, for autograd's save_for_backward, and self, which holds no operand until it gets them
        back."""
        tensors = [self.held(direction).buffers[name] for direction, name in self.metadata.stored]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take the buffers that prepare_for_saving() gave from the front of a list, and return the rest."""
        names = [f"{direction}_{name}" for direction, name in self.metadata.stored]
        self.hold(dict(zip(names, tensors, strict=False)))
        return list(tensors[len(names) :])

    @classmethod
    def make_like(cls, tensor: Self, *, dtype: Any = None, requires_grad: bool = False) -> Self:
        """Return another tensor of the same memory, in dtype (default: the tensor's)."""
        buffers = {name: buffer for direction in DIRECTIONS for name, buffer in tensor._buffers_of(direction).items()}
        return tensor.view_of(buffers, tensor.shape, dtype=dtype or tensor.dtype).requires_grad_(requires_grad)

    def held(self, direction: Direction) -> Any:
        """Return the operand of a direction. UserError for a tensor without operands."""
        operand = getattr(self, direction)
        if operand is None:
            raise NotHeld(
                f"a tensor in {self.quantizer} holds no {direction} operand after clear() or prepare_for_saving();"
                " give its buffers back by restore_from_saved(), or quantize the values again"
            )
        return operand

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Return the codes of both directions, or of one, without a copy; None for a direction that is not held.

        For two formats these are four: the codes of each sub-storage. A high-precision matrix serves both directions,
        and is given once. UserError without a direction.
        """
        if not (rowwise_data or columnwise_data):
            raise UserError("get_data_tensors: rowwise_data and columnwise_data are False; give True to one")
        row, column = self._rowwise_data, self._columnwise_data
        if not (rowwise_data and columnwise_data):
            return row if rowwise_data else column
        if self._is_hybrid:
            return row, None, None, column
        return row, None if len(self.metadata.stored) == 1 and row is not None else column

    def get_metadata(self) -> dict[str, Any]:
        """Return buffers, quantizer and dtype by the names of TransformerEngine's constructors."""
        if self._is_hybrid:
            names = ("rowwise_storage", "columnwise_storage")
        else:
            names = tuple(f"{d}_{of}" for d in DIRECTIONS for of in ("data", "scale_inv"))
            names += ("amax_rowwise", "amax_columnwise", "row_scaled_nvfp4", "nvfp4_use_4over6", "is_2D_scaled")
        fields = {name: getattr(self, f"_{name}") for name in names}
        return {**fields, "quantizer": self.quantizer, "fake_dtype": self.dtype}

    @property
    def _is_hybrid(self) -> bool:
        """Whether both directions are held, in different formats."""
        quantizer = self.quantizer
        return all(self.get_usages().values()) and quantizer.rowwise != quantizer.columnwise.rowwise_form

    def __getattr__(self, name: str) -> Any:
        """Return a field by the name that it has in TransformerEngine's tensors, such as _rowwise_data; to read."""
        if name in FIELDS:
            return FIELDS[name](self)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def _alone(self, direction: Direction) -> Self | None:
        if getattr(self, direction) is None:
            return None
        if direction not in self.alone:
            self.alone[direction] = self.view_of(self._buffers_of(direction), self.shape, directions=(direction,))
        return self.alone[direction]

    def _buffers_of(self, direction: Direction) -> dict[str, Any]:
        """Return the buffers of one direction by their names in a tensor that holds no other."""
        return {f"{direction}_{name}": buffer for name, buffer in self.held(direction).buffers.items()}


def _codes(direction: Direction) -> Callable[[Directions], Any]:
    """Return a function that reads the codes of a direction with the tensor's axes, or with the axes of its transpose
    [cols, ...]; None where it is not held."""

    def read(tensor: Directions) -> Any:
        operand = getattr(tensor, direction)
        if operand is None or operand.shape is None or tensor.dim() == 2:
            return operand and operand.buffers.get("q")
        codes, shape = operand.buffers["q"], tensor.shape
        if direction == "rowwise":
            return codes.reshape(*shape[:-1], -1) if shape else codes.reshape(())
        one_byte = codes.numel() == shape.numel() and shape[-1:] == operand.shape[:1]
        return codes.reshape(*shape[-1:], *shape[:-1]) if one_byte else codes

    return read


def _values(tensor: Directions) -> Any:
    """Return the codes of the rowwise direction, or of the columnwise one with the tensor's axes."""
    if tensor.rowwise is not None or tensor.columnwise is None:
        return _codes("rowwise")(tensor)
    return tensor.columnwise.buffers["q"].t().reshape(tensor.shape)


def _scales(direction: Direction, name: str) -> Callable[[Directions], Any]:
    """Return a function that reads scales or amaxes of a direction: [1] for a whole matrix, [rows] for rows; None where
    it has none."""

    def read(tensor: Directions) -> Any:
        operand = getattr(tensor, direction)
        scales = None if operand is None else operand.buffers.get(name)
        whole = scales is not None and operand.shape and operand.format.layout[name].cols == WHOLE
        return scales.view(-1) if whole else scales

    return read


def _option(tensor: Directions, name: str) -> bool:
    """Return an option of the format of the first held direction; False where the format does not have it."""
    held = "rowwise" if tensor.columnwise is None else tensor.metadata.directions[0]
    return getattr(getattr(tensor.quantizer, held), name, False)


FIELDS: dict[str, Callable[[Directions], Any]] = {
    "_rowwise_storage": lambda tensor: tensor.rowwise_sub_storage,
    "_columnwise_storage": lambda tensor: tensor.columnwise_sub_storage,
    "_quantizer": lambda tensor: tensor.quantizer,
    "_dtype": lambda tensor: tensor.dtype,
    "_row_scaled_nvfp4": lambda tensor: tensor.quantizer.rowwise.row_scaled,
    "_nvfp4_use_4over6": lambda tensor: _option(tensor, "four_over_six"),
    "_is_2D_scaled": lambda tensor: _option(tensor, "two_d"),
    "_with_gemm_swizzled_scales": lambda tensor: False,
    "_data": _codes("rowwise"),
    "_hp_data": _values,
    "_transpose": _codes("columnwise"),
    "_transpose_invalid": lambda tensor: tensor.columnwise is None,
    "_scale_inv": lambda tensor: next((s for s in map(tensor.__getattr__, SCALES) if s is not None), None),
    **{f"_{direction}_data": _codes(direction) for direction in DIRECTIONS},
    **{f"_{direction}_scale_inv": _scales(direction, "s") for direction in DIRECTIONS},
    **{f"_amax_{direction}": _scales(direction, "g") for direction in DIRECTIONS},
}
"""Private name in TransformerEngine -> what it is here. Scales are not padded, and not in the order of a GEMM."""
SCALES = ("_rowwise_scale_inv", "_columnwise_scale_inv")
