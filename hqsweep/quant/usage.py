"""The directions that a quantized tensor holds: read apart, or dropped, also by TransformerEngine's names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from hqsweep.errors import UserError
from hqsweep.quant.hybrid import DIRECTIONS, Direction


class Directions:
    """The part of HybridQuantizedTensor that knows its two directions."""

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
        return {direction: direction in self.metadata.directions for direction in DIRECTIONS}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the directions that are False; None leaves a direction as it is.

        UserError, before anything is dropped, for a missing direction that is True, and where none would be left.
        """
        wanted, held = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}, self.get_usages()
        missing = [direction for direction in DIRECTIONS if wanted[direction] and not held[direction]]
        if missing:
            raise UserError(
                f"update_usage: {missing[0]} usage is asked of a tensor in {self.quantizer} that holds no {missing[0]}"
                " operand; quantize the values again"
            )
        dropped = [direction for direction in DIRECTIONS if held[direction] and wanted[direction] in (False, 0)]
        if len(dropped) == sum(held.values()):
            raise UserError(f"update_usage: nothing of a tensor in {self.quantizer} would be left; keep one direction")
        for direction in dropped:
            self.drop(direction)

    def __getattr__(self, name: str) -> Any:
        """Return a field by the name that it has in TransformerEngine's tensors, such as _rowwise_data; to read."""
        if name in FIELDS:
            return FIELDS[name](self)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def _alone(self, direction: Direction) -> Self | None:
        if direction not in self.metadata.directions:
            return None
        return self.view_of(self._buffers_of(direction), self.shape, directions=(direction,))

    def _buffers_of(self, direction: Direction) -> dict[str, Any]:
        """Return the buffers of one direction by their names in a tensor that holds no other."""
        return {f"{direction}_{name}": buffer for name, buffer in getattr(self, direction).buffers.items()}


def _buffer(direction: Direction, name: str) -> Callable[[Directions], Any]:
    """Return a function that reads a buffer of a direction; None where it is not held."""

    def read(tensor: Directions) -> Any:
        operand = getattr(tensor, direction)
        return None if operand is None else operand.buffers.get(name)

    return read


FIELDS: dict[str, Callable[[Directions], Any]] = {
    "_rowwise_storage": lambda tensor: tensor.rowwise_sub_storage,
    "_columnwise_storage": lambda tensor: tensor.columnwise_sub_storage,
    "_quantizer": lambda tensor: tensor.quantizer,
    "_data": _buffer("rowwise", "q"),
    "_hp_data": _buffer("rowwise", "q"),
    "_transpose": _buffer("columnwise", "q"),
    "_transpose_invalid": lambda tensor: tensor.columnwise is None,
    "_scale_inv": lambda tensor: next((s for s in map(tensor.__getattr__, SCALES) if s is not None), None),
    **{f"_{direction}_data": _buffer(direction, "q") for direction in DIRECTIONS},
    **{f"_{direction}_scale_inv": _buffer(direction, "s") for direction in DIRECTIONS},
    **{f"_amax_{direction}": _buffer(direction, "g") for direction in DIRECTIONS},
}
"""Private name in TransformerEngine -> what it is here. Scales are not padded, and not in the order of a GEMM."""
SCALES = ("_rowwise_scale_inv", "_columnwise_scale_inv")
