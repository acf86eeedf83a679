"""The directions that a quantized tensor holds: read apart, saved, or dropped, also by TransformerEngine's names.

A tensor without any operand, after clear() or prepare_for_saving(), keeps its shape, dtype and formats. Reading and
writing it raise UserError.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE
from hqsweep.quant.hybrid import DIRECTIONS, Direction


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
