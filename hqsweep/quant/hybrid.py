"""HybridQuantizer: a format for each direction in which a tensor is read, and what the columnwise one is made from.

Vanilla quantization is the case of equal formats. The text form is ROW|COL@SOURCE: "nvfp4|mxfp8@rowwise_dequantized",
"nvfp4|mxfp8" (source original), or "mxfp8" for both directions. The random Hadamard transform acts on columnwise
operands only, so "nvfp4+rht" for both directions means "nvfp4|nvfp4+rht".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hqsweep.config.format_text import QUANTIZER_FIELDS, check_source, quantizer_texts
from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, Identity, RngKey, RngKeys, parse
from hqsweep.memo import cached_property
from hqsweep.ops.members.layout import GroupLayout
from hqsweep.ops.members.packed import Result
from hqsweep.ops.members.splits import Splits
from hqsweep.ops.model.activation import activation, activation_backward
from hqsweep.ops.quantize.blocks import takes_formats
from hqsweep.ops.quantize.plain import Pair, quantize_plain
from hqsweep.ops.quantize.quantize import Quantized, quantize, quantized_of
from hqsweep.ops.quantize.quantize_activated import quantize_activated, shape_of
from hqsweep.ops.quantize.quantize_normed import Normed, quantize_normed
from hqsweep.ops.quantize.request import NO_TARGET, Output, Request, Target, request_of, text_of
from hqsweep.ops.stats import Sums, gather_by_row
from hqsweep.parallel.shards.shard_place import Place
from hqsweep.quant.delayed import SlotStates, grids_of, note
from hqsweep.quant.operand import HybridOperand, Operand

FIELDS = QUANTIZER_FIELDS
DIRECTIONS = ("rowwise", "columnwise")
Direction = Literal["rowwise", "columnwise"]


@dataclass(frozen=True)
class HybridQuantizer:
    """The formats of a tensor; frozen and hashable. Which directions to make, the key of stochastic rounding and the
    states of delayed scaling are call arguments."""

    rowwise: Format
    columnwise: Format
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        check_source(self.columnwise_source)
        if self.rowwise.rht:
            raise UserError(f"rowwise format {self.rowwise}: +rht acts on columnwise operands only; drop it here")
        if self.columnwise.row_scaled:
            raise UserError(
                f"columnwise format {self.columnwise}: +row_scaled is for rowwise operands only; drop it here"
            )
        # Worked out now: torch.compile cannot trace the lock that a cached_property of Python 3.11 takes.
        _ = (
            self.stochastic,
            self.reads_key,
            self.delayed,
            self.takes_values_alone,
            self.row_multiple,
            self.rowwise.layout,
            self.columnwise.layout,
            self.rowwise.text,
            self.columnwise.text,
        )

    @classmethod
    def parse(cls, value: "str | Mapping[str, str] | HybridQuantizer") -> "HybridQuantizer":
        """The quantizer of "ROW|COL@SOURCE", or of {rowwise, columnwise, columnwise_source} with the last one
        optional."""
        if isinstance(value, HybridQuantizer):
            return value
        row, column, source = quantizer_texts(value)
        if column is not None:
            return cls(parse(row), parse(column), source)
        both = parse(row)
        return cls(both.rowwise_form, both, source)

    def __str__(self) -> str:
        formats = f"{self.rowwise}|{self.columnwise}"
        if self.rowwise == self.columnwise.rowwise_form:
            formats = str(self.columnwise)
        return formats if self.columnwise_source == "original" else f"{formats}@{self.columnwise_source}"

    @cached_property
    def stochastic(self) -> bool:
        """Whether a direction draws random bits."""
        return any(format.stochastic for format in (self.rowwise, self.columnwise))

    @cached_property
    def reads_key(self) -> bool:
        """Whether quantize needs the key of its call: where bits are drawn, and for a class of somebody else, which may
        draw its own."""
        return self.stochastic or type(self) is not HybridQuantizer

    @cached_property
    def delayed(self) -> bool:
        """Whether the scale of a direction comes from the amaxes of earlier steps."""
        return any(format.delayed for format in (self.rowwise, self.columnwise))

    @cached_property
    def takes_values_alone(self) -> bool:
        """Whether quantize needs nothing but x, which neither direction holds as it is."""
        held = any(format.high_precision for format in (self.rowwise, self.columnwise))
        return not (self.stochastic or self.delayed or held)

    @cached_property
    def row_multiple(self) -> int:
        """The number that divides the rows of a tensor whose columnwise operand is made."""
        return self.columnwise.column_multiple

    @property
    def may_save_original(self) -> bool:
        """Whether backward may keep the tensor and make the columnwise operand from it again.

        With rowwise_dequantized that would take the rowwise operand, too, so the columnwise operand is kept.
        """
        return self.columnwise_source == "original"

    @property
    def takes_amax(self) -> bool:
        """Whether quantize_under() has a use for the amax."""
        return _takes_amax(self.rowwise) or self._column_takes_amax_of_x

    @property
    def _column_takes_amax_of_x(self) -> bool:
        """Whether the columnwise operand's amax is x's, and not that of transformed or decoded values."""
        return _takes_amax(self.columnwise) and not self.columnwise.rht and self.columnwise_source == "original"

    def quantize(
        self,
        x: Tensor,
        *,
        rowwise: Output | None = "codes",
        columnwise: Output | None = "codes",
        key: RngKey | Sequence[RngKey | None] | None = None,
        states: SlotStates | Sequence[SlotStates] | None = None,
        splits: Splits | None = None,
        by_rows: bool = False,
        amaxes: Sequence[Tensor] = (),
        place: Place | None = None,
    ) -> HybridOperand:
        """[rows, cols] -> operands of the directions asked for, in one read of x; the columnwise one encodes x.T.

        Each is wanted as "codes" (an Operand, to keep), "exact" (an ExactOperand, to multiply at once) or None. With
        rowwise_dequantized the columnwise operand is made from dequantize(rowwise), rounded to x's dtype. Directions in
        fp8_delayed are scaled by the states of the slot, which then take note of x's amaxes in one more read; UserError
        without them.

        splits: the rows belong to the members of a group. Each member is quantized as if it were alone, under its own
        key and states, into operands with a layout. by_rows: see ops.request.Target. amaxes: those of x bfloat16 that
        takes_amaxes() names, where they are known; otherwise they are found in a pass of their own. The bytes are the
        same.

        place: x is a part of a whole matrix, and its elements draw the random bits that they draw there. Scales come
        from x alone: amaxes that the whole shares are given. UserError for a place together with splits.
        """
        if place is not None and splits is not None:
            raise UserError("quantize: a place is that of one matrix; the matrices of splits are each a whole")
        if self.takes_values_alone and states is None and not amaxes:
            texts = self.rowwise.text, self.columnwise.text
            plain = quantize_plain(x, splits, Pair(*texts, self.columnwise_source, rowwise, columnwise, by_rows))
            if plain is not None:
                return self._operands(Quantized(*plain[:2]), tuple(x.shape), x.dtype, splits, rowwise)
        row, column = self._targets(rowwise, columnwise, by_rows)
        if amaxes:
            row, column = self._under(row, column, amaxes)
        results = self._quantize(x, row, column, key, states, splits=splits, place=place)
        return self._operands(results, tuple(x.shape), x.dtype, splits, rowwise)

    def quantize_sent(self, x: Tensor, columnwise: Output | None = None) -> HybridOperand:
        """quantize() to rowwise codes that are to be sent, and to be multiplied here, without random bits and states:
        where one pass can write both, the result has their exact operand, too, and their buffers lie in one memory."""
        texts = self.rowwise.text, self.columnwise.text
        pair = Pair(*texts, self.columnwise_source, "codes", columnwise, decoded=True)
        plain = quantize_plain(x, None, pair) if self.takes_values_alone else None
        if plain is None:
            return self.quantize(x, columnwise=columnwise)
        operands = self._operands(Quantized(*plain[:2]), tuple(x.shape), x.dtype, None, "codes")
        return replace(operands, rowwise_exact=plain[2])

    def quantize_given(
        self,
        x: Tensor,
        grids: Mapping[str, Buffers],
        *,
        rowwise: Output | None = "codes",
        columnwise: Output | None = "codes",
        key: RngKey | None = None,
        place: Place | None = None,
    ) -> HybridOperand:
        """quantize() for a part of a whole under the amaxes of the whole: direction -> grid (ops.request.Target), where
        its format takes one that the part alone does not know. UserError for a quantizer with a quantize of its own."""
        if type(self).quantize is not HybridQuantizer.quantize:
            raise UserError(
                f"a part of a whole cannot be quantized by {type(self).__name__}, whose quantize is its own and may"
                " need the whole; quantize the whole, or use the formats of HybridQuantizer"
            )
        row, column = self._targets(rowwise, columnwise)
        row, column = (
            target._replace(grid=grids.get(direction))
            for direction, target in zip(DIRECTIONS, (row, column), strict=True)
        )
        results = self._quantize(x, row, column, key, None, place=place)
        return self._operands(results, tuple(x.shape), x.dtype, None, rowwise)

    def quantize_under(
        self,
        x: Tensor,
        amax: Tensor | Mapping[str, Tensor | None],
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        key: RngKey | None = None,
        states: SlotStates | None = None,
        place: Place | None = None,
    ) -> HybridOperand:
        """quantize() for an x whose amax is known, float32 [1, 1]: formats with one amax of the whole matrix need no
        search. The bytes are the same. A mapping gives the amax of each direction's operand, which is then encoded
        under it whatever x has, such as the amax of a whole that x is a part of; for +row_scaled it is [rows, 1].
        place: see quantize()."""
        row, column = self._targets(rowwise, columnwise)
        if isinstance(amax, Tensor):
            row, column = _under(row, amax), _under(column, amax) if self._column_takes_amax_of_x else column
        else:
            row, column = _with_amaxes(row, column, amax)
        results = self._quantize(x, row, column, key, states, place=place)
        return self._operands(results, tuple(x.shape), x.dtype, None, rowwise)

    def quantize_members_under(
        self,
        x: Tensor,
        amaxes: Mapping[str, Tensor | None],
        splits: Splits,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        states: Sequence[SlotStates] | None = None,
        by_rows: bool = False,
    ) -> HybridOperand:
        """quantize() with splits, without random bits, under known amaxes of each direction: float32 [members], or for
        +row_scaled [rows], for which the host waits for the splits. What x has itself is not looked at."""
        row, column = _with_amaxes(*self._targets(rowwise, columnwise, by_rows), amaxes, splits)
        results = self._quantize(x, row, column, None, states, splits=splits)
        return self._operands(results, tuple(x.shape), x.dtype, splits, rowwise)

    def quantize_activated(
        self,
        z: Tensor,
        dh: Tensor | None,
        kind: str,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        key: RngKey | None = None,
        states: SlotStates | None = None,
    ) -> HybridOperand:
        """quantize() for h = activation(z), or with dh for the gradient of z: on CUDA, for a z that activation() takes.

        It is one pass from z where all scales are found in blocks, without random bits. Otherwise the matrix is made
        and quantized, under the amaxes that the activation's kernel finds, where formats have one of the whole. The
        bytes are the same.
        """
        if type(self) is not HybridQuantizer:
            (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
            return self.quantize(x, rowwise=rowwise, columnwise=columnwise, key=key, states=states)
        row, column = self._targets(rowwise, columnwise)
        request = self._request(row, column)
        if takes_formats(request):
            results = quantized_of(request, quantize_activated(request, z, dh, kind))
            return self._operands(results, shape_of(z, dh, kind), z.dtype, None, rowwise)
        wanted = self.takes_amaxes(rowwise, columnwise)
        (x, *amaxes) = activation(z, kind, *wanted) if dh is None else activation_backward(dh, z, kind, *wanted)
        if amaxes:
            row, column = self._under(row, column, amaxes)
        results = self._quantize(x, row, column, key, states)
        return self._operands(results, tuple(x.shape), x.dtype, None, rowwise)

    def takes_normed(self, rowwise: Output | None, columnwise: Output | None) -> bool:
        """Whether quantize_normed() takes these outputs: all scales are found in blocks, without random bits."""
        return type(self) is HybridQuantizer and takes_formats(self._request(*self._targets(rowwise, columnwise)))

    def quantize_normed(
        self, of: Normed, *, rowwise: Output | None = None, columnwise: Output | None = None
    ) -> HybridOperand:
        """quantize() for a norm's output, on CUDA, for outputs that takes_normed(): one pass from the sum that it is
        the norm of. The bytes are the same."""
        results = quantized_of(
            request := self._request(*self._targets(rowwise, columnwise)), quantize_normed(request, of)
        )
        return self._operands(results, tuple(of.total.shape), of.total.dtype, None, rowwise)

    def _request(self, row: Target, column: Target) -> Request:
        source = self.columnwise_source if column.format else "original"
        return request_of(text_of(row.format), text_of(column.format), source, row.output, column.output)

    def takes_amaxes(self, rowwise: Output | None, columnwise: Output | None) -> tuple[bool, bool | None]:
        """Which amaxes of a whole matrix quantize() takes for these outputs, each float32 [1, 1] with NaN aside.

        First, whether it takes the amax of the matrix's elements; second, the signs of the random Hadamard transform
        after which it takes the amax of the columns, rounded to bfloat16, or None.
        """
        row, column = self._targets(rowwise, columnwise)
        if type(self) is not HybridQuantizer:
            return False, None
        of_x = column.format if self.columnwise_source == "original" else None
        signs = _signs_of(of_x)
        return _takes_amax(row.format) or _takes_amax(of_x), signs

    def _under(self, row: Target, column: Target, amaxes: Sequence[Tensor]) -> tuple[Target, Target]:
        """The targets with grids of the amaxes that takes_amaxes() names, where their formats take one."""
        row = _under(row, amaxes[0])
        if self.columnwise_source != "original":
            return row, column
        transformed = _signs_of(column.format) is not None
        place = 1 if transformed else 0  # no bool: a trace indexes with integers
        return row, _under(column, amaxes[place]) if len(amaxes) > place else column

    def _targets(
        self, rowwise: Output | None, columnwise: Output | None, by_rows: bool = False
    ) -> tuple[Target, Target]:
        """The targets of the outputs that are asked for."""
        needs_row = rowwise is not None or (columnwise and self.columnwise_source == "rowwise_dequantized")
        row = Target(self.rowwise, rowwise or "codes") if needs_row else NO_TARGET
        return row, Target(self.columnwise, columnwise, by_rows=by_rows) if columnwise else NO_TARGET

    def _operands(
        self,
        results: Quantized,
        shape: tuple[int, int],
        dtype: torch.dtype,
        splits: Splits | None,
        rowwise: Output | None,
    ) -> HybridOperand:
        """The operands of a matrix of this shape, the rowwise one only if it is asked for."""
        row = _operand(results.rowwise, self.rowwise, shape, dtype, splits) if rowwise else None
        column = _operand(results.columnwise, self.columnwise, shape[::-1], dtype, splits, columnwise=True)
        return HybridOperand(rowwise=row, columnwise=column)

    def statistics(
        self, x: Tensor, key: RngKey | None = None, states: SlotStates | None = None
    ) -> dict[Direction, dict[str, float]]:
        """Rows of ops.stats for both directions of x [rows, cols], gathered in the pass that quantizes it.

        Errors are against the values of x. The pass compares an operand with what it is made from, so that with
        rowwise_dequantized the columnwise one is decoded and compared again. States are read and not changed.
        """
        return {direction: sums.row() for direction, sums in self.sums(x, key, states).items()}

    def sums(
        self,
        x: Tensor,
        key: RngKey | None = None,
        states: SlotStates | None = None,
        *,
        amaxes: Mapping[str, Tensor | None] | None = None,
        place: Place | None = None,
    ) -> dict[Direction, Sums]:
        """The sums that statistics() are computed from; waits for the device. amaxes, place: as quantize_under() has
        them."""
        states = states and replace(states, record=False)
        row, column = Target(self.rowwise), Target(self.columnwise)
        if amaxes is not None:
            row, column = _with_amaxes(row, column, amaxes)
        results = self._quantize(x, row, column, key, states, place=place, statistics=True)
        of_columns = results.columnwise_statistics
        if self.columnwise_source == "rowwise_dequantized":
            of_columns = gather_by_row(x.t(), self.columnwise, results.columnwise)
        return {"rowwise": results.rowwise_statistics.read(), "columnwise": of_columns.read()}

    def _quantize(
        self,
        x: Tensor,
        row: Target,
        column: Target,
        key: RngKey | Sequence[RngKey | None] | None,
        states: SlotStates | Sequence[SlotStates] | None,
        *,
        place: Place | None = None,
        **options: Any,
    ) -> Quantized:
        """ops.quantize with these options, under the keys and the states, which take note of the amaxes."""
        source = self.columnwise_source if column.format else "original"
        if states is None and not self.stochastic:
            return quantize(x, row, column, columnwise_source=source, **options)
        keys, formats = self.direction_keys(key, place), {"rowwise": row.format, "columnwise": column.format}
        slots, splits = [states] if isinstance(states, SlotStates) else states, options.get("splits")
        grids = grids_of(slots, formats) if slots else {}
        if splits is None:
            grids = {direction: of_slots[0] for direction, of_slots in grids.items()}
        row = row._replace(key=keys["rowwise"], grid=grids.get("rowwise", row.grid))
        column = column._replace(key=keys["columnwise"], grid=grids.get("columnwise", column.grid))
        results = quantize(x, row, column, columnwise_source=source, **options)
        if slots:
            note(slots, x, splits, formats, source, row)
        return results

    def direction_keys(
        self, key: RngKey | Sequence[RngKey | None] | None, place: Place | None = None
    ) -> dict[str, Any]:
        """Direction -> its stream of the slot, or of every slot, where its format draws bits; else None. place: that of
        a part of a whole."""
        if isinstance(key, Sequence) and not isinstance(key, RngKeys):
            of_slots = [self.direction_keys(own) for own in key]
            return {direction: [own[direction] for own in of_slots] for direction in DIRECTIONS}
        draws = {d: key is not None and getattr(self, d).stochastic for d in DIRECTIONS}
        keys = {direction: key.under(direction) if draws[direction] else None for direction in DIRECTIONS}
        if place is None:
            return keys
        return {direction: own and place.key(own, direction) for direction, own in keys.items()}


def _takes_amax(format: Format | None) -> bool:
    """Whether the format's only amax is that of the matrix, as it comes or after a transform."""
    return format is not None and format.amax_name is not None and not (format.delayed or format.row_scaled)


def _signs_of(format: Format | None) -> bool | None:
    """The transform's signs, for a columnwise format whose amax is that of transformed columns; None for any other."""
    return format.rht_signed if _takes_amax(format) and format.rht else None


def _with_amaxes(
    row: Target, column: Target, amaxes: Mapping[str, Tensor | None], splits: Splits | None = None
) -> tuple[Target, Target]:
    """The targets with the amax of each direction, or of every member, where it is known."""
    row_amax, column_amax = amaxes["rowwise"], amaxes["columnwise"]
    row = row if row_amax is None else row._replace(grid=_grid(row.format, row_amax, splits))
    return row, column if column_amax is None else column._replace(grid=_grid(column.format, column_amax, splits))


def _grid(format: Format, amaxes: Tensor, splits: Splits | None) -> Buffers | list[Buffers]:
    """The grid of these amaxes, or those of all members."""
    if splits is None:
        return {format.amax_name: amaxes}
    of_members = amaxes.view(-1, 1).split(list(splits.host) if format.row_scaled else 1)
    return [{format.amax_name: own} for own in of_members]


def _under(target: Target, amax: Tensor) -> Target:
    """The target with a grid of that amax, where its format takes one."""
    return target._replace(grid={target.format.amax_name: amax}) if _takes_amax(target.format) else target


def _operand(
    result: Result | None,
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype,
    splits: Splits | None,
    *,
    columnwise: bool = False,
) -> Operand | ExactOperand | None:
    """The operand of a result. shape: the operand's; for members' packed operands that of X, or of X.T."""
    if result is None or isinstance(result, ExactOperand):
        return result
    if splits is not None:
        layout = GroupLayout.of(splits, shape[0] if columnwise else shape[1], columnwise=columnwise)
        return Operand(format=format, layout=layout, dtype=dtype, buffers=result)
    return Operand(format=format, shape=shape, dtype=dtype, buffers=result)


def IdentityQuantizer(name: str = "bf16") -> HybridQuantizer:
    """High precision in both directions: "bf16", "fp16" or "fp32"."""
    return HybridQuantizer(Identity(name=name), Identity(name=name))
