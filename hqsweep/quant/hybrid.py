"""HybridQuantizer: one format per direction, and the source of the columnwise operand.

Vanilla quantization is the case of equal formats. The text form is ROW|COL@SOURCE: "nvfp4|mxfp8@rowwise_dequantized",
"nvfp4|mxfp8" (source original), or "mxfp8" for both directions. One text sets the random Hadamard transform for the
columnwise operand, so "nvfp4+rht" for both directions means "nvfp4|nvfp4+rht"; "nvfp4+rht|nvfp4+rht" transforms both.

ProjectedQuantizer first rounds a weight to the grid of a narrower format: "project(mxfp4) > mxfp8".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, Format, Identity, RngKey, RngKeys, parse
from hqsweep.formats.spec import (
    QUANTIZER_FIELDS,
    check_projection,
    check_source,
    projection_text,
    quantizer_texts,
    split_projection,
)
from hqsweep.memo import cached_property
from hqsweep.ops.elementwise import activation, activation_backward
from hqsweep.ops.quantize.fused import Normed, quantize_activated, quantize_normed, shape_of, takes_formats
from hqsweep.ops.quantize.quantize import Pair, Quantized, quantize, quantize_plain, quantized_of
from hqsweep.ops.quantize.request import Output, Request, Target, request_of, text_of
from hqsweep.ops.splits import Splits
from hqsweep.ops.stats import Sums, TileSums, exact_tiles, gather_by_row
from hqsweep.parallel.shards.shard import Place
from hqsweep.quant.delayed import SlotStates, grids_of, note
from hqsweep.quant.operand import HybridOperand, Operand, operands_of
from hqsweep.quant.targets import (
    found_under,
    signs_of,
    takes_amax_of_x,
    targets_of,
    under,
    with_amaxes,
)

FIELDS = QUANTIZER_FIELDS
DIRECTIONS = ("rowwise", "columnwise")
Direction = Literal["rowwise", "columnwise"]


@dataclass(frozen=True)
class HybridQuantizer:
    """The formats of a tensor; frozen and hashable.

    The wanted directions, the key of stochastic rounding and the states of delayed scaling are call arguments.
    """

    rowwise: Format
    columnwise: Format
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        check_source(self.columnwise_source)
        if self.rowwise.rht and self.columnwise_source == "rowwise_dequantized":
            raise UserError(
                f"rowwise format {self.rowwise}: with +rht its decoded values are transformed, and no columnwise"
                " operand can be made from them; take source original"
            )
        if self.columnwise.rowwise_only:
            raise UserError(
                f"columnwise format {self.columnwise}: +row_scaled is for rowwise operands only; drop it here"
            )
        # Computed now: torch.compile cannot trace the lock in Python 3.11's cached_property.
        _ = self.stochastic, self.reads_key, self.delayed, self.takes_values_alone, self.row_multiple
        _ = self.rowwise.layout, self.columnwise.layout, self.rowwise.text, self.columnwise.text

    @classmethod
    def parse(cls, value: "str | Mapping[str, str] | HybridQuantizer") -> "HybridQuantizer":
        """Return the quantizer of "ROW|COL@SOURCE", of a mapping {rowwise, columnwise, columnwise_source (optional)},
        or of an object with one as `frozen` (hqsweep.compat's). With "project(GRID) >" before the text, or the key
        project, it is a ProjectedQuantizer."""
        value = getattr(value, "frozen", value)
        if isinstance(value, HybridQuantizer):
            return value
        grid, value = split_projection(value)
        if grid is not None:
            own = cls.parse(value)
            return ProjectedQuantizer(own.rowwise, own.columnwise, own.columnwise_source, projection=parse(grid))
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
        """Whether quantize() needs a key: if bits are drawn, or for a user's subclass, which may draw its own."""
        return self.stochastic or type(self) is not HybridQuantizer

    @cached_property
    def delayed(self) -> bool:
        """Whether a direction's scale comes from the amaxes of earlier steps."""
        return any(format.delayed for format in (self.rowwise, self.columnwise))

    @cached_property
    def takes_values_alone(self) -> bool:
        """Whether quantize() needs only x, and neither direction keeps x in high precision."""
        held = any(format.high_precision for format in (self.rowwise, self.columnwise))
        return not (self.stochastic or self.delayed or held)

    @cached_property
    def row_multiple(self) -> int:
        """The rows of a tensor must be a multiple of this for a columnwise operand."""
        return self.columnwise.column_multiple

    @property
    def may_save_original(self) -> bool:
        """Whether backward may save the tensor and compute the columnwise operand from it again.

        With rowwise_dequantized that needs the rowwise operand too, so the columnwise operand is saved instead.
        """
        return self.columnwise_source == "original"

    @property
    def takes_amax(self) -> bool:
        """Whether quantize_under() can use the amax."""
        return takes_amax_of_x(self.rowwise) or self._column_takes_amax_of_x

    @property
    def _column_takes_amax_of_x(self) -> bool:
        """Whether the columnwise operand's amax is x's own, not that of transformed or decoded values."""
        return takes_amax_of_x(self.columnwise) and self.columnwise_source == "original"

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
        """Quantize x [rows, cols] and return the wanted operands, in one read of x. The columnwise operand encodes x.T.

        rowwise, columnwise: "codes" (an Operand, to keep), "exact" (an ExactOperand, to multiply at once) or None. With
        rowwise_dequantized the columnwise operand encodes dequantize(rowwise), rounded to x's dtype. states: required
        for fp8_delayed, whose scales they set; they record x's amaxes in one more read.

        splits: the rows belong to the members of a group. Each member is quantized as if alone, under its own key and
        states, and the operands have a layout. by_rows: see Target.
        amaxes: the amaxes of a bfloat16 x that takes_amaxes() names, if known. Otherwise a separate pass finds them;
        the bytes are the same.
        place: x is part of a whole matrix, and its elements draw the same random bits as there. Scales still come from
        x alone; to share amaxes with the whole, pass them.

        Raises:
            UserError: for fp8_delayed without states, for +sr without a key, and for a place together with splits.
        """
        if place is not None and splits is not None:
            raise UserError("quantize: a place is that of one matrix; the matrices of splits are each a whole")
        if self.takes_values_alone and states is None and not amaxes:
            texts = self.rowwise.text, self.columnwise.text
            plain = quantize_plain(x, splits, Pair(*texts, self.columnwise_source, rowwise, columnwise, by_rows))
            if plain is not None:
                return operands_of(self, Quantized(*plain[:2]), tuple(x.shape), x.dtype, splits, rowwise)
        row, column = targets_of(self, rowwise, columnwise, by_rows)
        if amaxes:
            row, column = found_under(row, column, amaxes, self.columnwise_source)
        results = self._quantize(x, row, column, key, states, splits=splits, place=place)
        return operands_of(self, results, tuple(x.shape), x.dtype, splits, rowwise)

    def quantize_sent(self, x: Tensor, columnwise: Output | None = None) -> HybridOperand:
        """Quantize x to rowwise codes that are sent and also multiplied here, without random bits and states.

        If one pass can write both, the result also has their exact operand, and the buffers share one memory.
        """
        texts = self.rowwise.text, self.columnwise.text
        pair = Pair(*texts, self.columnwise_source, "codes", columnwise, decoded=True)
        plain = quantize_plain(x, None, pair) if self.takes_values_alone else None
        if plain is None:
            return self.quantize(x, columnwise=columnwise)
        operands = operands_of(self, Quantized(*plain[:2]), tuple(x.shape), x.dtype, None, "codes")
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
        """Quantize a part of a whole under amaxes of the whole.

        grids: direction -> grid (see Target), for formats whose amax the part does not know. UserError for a class with
        its own quantize().
        """
        if type(self).quantize is not HybridQuantizer.quantize:
            raise UserError(
                f"a part of a whole cannot be quantized by {type(self).__name__}, whose quantize is its own and may"
                " need the whole; quantize the whole, or use the formats of HybridQuantizer"
            )
        row, column = targets_of(self, rowwise, columnwise)
        row, column = (
            target._replace(grid=grids.get(direction))
            for direction, target in zip(DIRECTIONS, (row, column), strict=True)
        )
        results = self._quantize(x, row, column, key, None, place=place)
        return operands_of(self, results, tuple(x.shape), x.dtype, None, rowwise)

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
        """Quantize x under a known amax, float32 [1, 1]: formats with one amax per matrix need no search.

        A single amax is x's own; the bytes are the same as without it. A mapping gives the amax of each direction's
        operand, for example of a whole that contains x, and overrides x's own; for +row_scaled it is [rows, 1]. place:
        see quantize().
        """
        row, column = targets_of(self, rowwise, columnwise)
        if isinstance(amax, Tensor):
            row, column = under(row, amax), under(column, amax) if self._column_takes_amax_of_x else column
        else:
            row, column = with_amaxes(row, column, amax)
        results = self._quantize(x, row, column, key, states, place=place)
        return operands_of(self, results, tuple(x.shape), x.dtype, None, rowwise)

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
        """Quantize with splits under known amaxes of each direction, without random bits. x's own amaxes are not used.

        amaxes: float32 [members], or [rows] for +row_scaled, for which the host waits for the splits.
        """
        row, column = with_amaxes(*targets_of(self, rowwise, columnwise, by_rows), amaxes, splits)
        results = self._quantize(x, row, column, None, states, splits=splits)
        return operands_of(self, results, tuple(x.shape), x.dtype, splits, rowwise)

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
        """Quantize h = activation(z), or with dh the gradient of z: on CUDA, for a z that activation() takes.

        Formats with all scales in blocks and no random bits take one pass from z. Otherwise the matrix is computed
        first, and the activation's kernel finds its global amaxes. The bytes are the same.
        """
        if type(self) is not HybridQuantizer:
            (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
            return self.quantize(x, rowwise=rowwise, columnwise=columnwise, key=key, states=states)
        row, column = targets_of(self, rowwise, columnwise)
        request = self._request(row, column)
        if takes_formats(request):
            results = quantized_of(request, quantize_activated(request, z, dh, kind))
            return operands_of(self, results, shape_of(z, dh, kind), z.dtype, None, rowwise)
        wanted = self.takes_amaxes(rowwise, columnwise)
        (x, *amaxes) = activation(z, kind, *wanted) if dh is None else activation_backward(dh, z, kind, *wanted)
        if amaxes:
            row, column = found_under(row, column, amaxes, self.columnwise_source)
        results = self._quantize(x, row, column, key, states)
        return operands_of(self, results, tuple(x.shape), x.dtype, None, rowwise)

    def takes_normed(self, rowwise: Output | None, columnwise: Output | None) -> bool:
        """Return whether quantize_normed() takes these outputs: all scales are in blocks, without random bits."""
        return type(self) is HybridQuantizer and takes_formats(self._request(*targets_of(self, rowwise, columnwise)))

    def quantize_normed(
        self, of: Normed, *, rowwise: Output | None = None, columnwise: Output | None = None
    ) -> HybridOperand:
        """Quantize a norm's output in one pass from its sum, on CUDA. takes_normed() must hold. The bytes equal
        quantize()."""
        request = self._request(*targets_of(self, rowwise, columnwise))
        results = quantized_of(request, quantize_normed(request, of))
        return operands_of(self, results, tuple(of.total.shape), of.total.dtype, None, rowwise)

    def _request(self, row: Target, column: Target) -> Request:
        source = self.columnwise_source if column.format else "original"
        return request_of(text_of(row.format), text_of(column.format), source, row.output, column.output)

    def takes_amaxes(self, rowwise: Output | None, columnwise: Output | None) -> tuple[bool, bool | None]:
        """Return (elements, signs): the amaxes of a whole matrix that quantize() takes for these outputs.

        elements: whether it takes the amax of the elements. signs: None, or the signs of the random Hadamard transform
        after which it takes the columns' amax, rounded to bfloat16. Amaxes are float32 [1, 1]; NaN is ignored.
        """
        row, column = targets_of(self, rowwise, columnwise)
        if type(self) is not HybridQuantizer:
            return False, None
        of_x = column.format if self.columnwise_source == "original" else None
        signs = signs_of(of_x)
        return takes_amax_of_x(row.format) or takes_amax_of_x(of_x) or signs is not None, signs

    def statistics(
        self, x: Tensor, key: RngKey | None = None, states: SlotStates | None = None
    ) -> dict[Direction, dict[str, float]]:
        """Return the statistics (ops.stats) of both directions of x [rows, cols], gathered in the quantizing pass.

        Errors are relative to x's values. The pass itself compares an operand with its source, so with
        rowwise_dequantized the columnwise operand is decoded and compared again. States are read but not changed.
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
        """Return the sums behind statistics(); waits for the device. amaxes, place: see quantize_under()."""
        states = states and replace(states, record=False)
        row, column = Target(self.rowwise), Target(self.columnwise)
        if amaxes is not None:
            row, column = with_amaxes(row, column, amaxes)
        results = self._quantize(x, row, column, key, states, place=place, statistics=True)
        of_columns = results.columnwise_statistics
        if self.columnwise_source == "rowwise_dequantized":
            own = self.direction_keys(key, place)["columnwise"]
            of_columns = gather_by_row(x.t(), self.columnwise, results.columnwise, key=own)
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
        """Run ops.quantize with these options under the keys and states; the states record the amaxes."""
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
        """Return direction -> its stream of the slot, or of every slot, if its format draws bits; else None.

        place: the place of a part in its whole.
        """
        if isinstance(key, Sequence) and not isinstance(key, RngKeys):
            of_slots = [self.direction_keys(own) for own in key]
            return {direction: [own[direction] for own in of_slots] for direction in DIRECTIONS}
        draws = {d: key is not None and getattr(self, d).stochastic for d in DIRECTIONS}
        keys = {direction: key.under(direction) if draws[direction] else None for direction in DIRECTIONS}
        if place is None:
            return keys
        return {direction: own and place.key(own, direction) for direction, own in keys.items()}


@dataclass(frozen=True)
class ProjectedQuantizer(HybridQuantizer):
    """A HybridQuantizer, the host, of a weight that is first rounded to the grid of a narrower format.

    A training then computes with the weights of a checkpoint in that format. Gradients pass straight through to the
    weight. The grid's blocks run along the rows of the weight, and both directions are made of the projected values.
    UserError for another grid than MXFP4, MXFP6 and NVFP4, for one with random bits or a transform, and for a host
    whose blocks have no power-of-two scales.
    """

    projection: Format = field(kw_only=True)
    """The format of the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_projection(self.projection.text, (self.rowwise.text, self.columnwise.text))
        _ = self.on_grid

    def __str__(self) -> str:
        return projection_text(self.projection.text, super().__str__())

    @cached_property
    def on_grid(self) -> HybridQuantizer:
        """The quantizer of the grid itself."""
        return HybridQuantizer(self.projection, self.projection)

    def codes(self, x: Tensor) -> Operand:
        """Return x [rows, cols] in the grid's format, with blocks along cols."""
        return self.on_grid.quantize(x, columnwise=None).rowwise

    def project(self, x: Tensor) -> Tensor:
        """Return x [rows, cols] rounded to the grid, in x's dtype.

        The values of MXFP4 and MXFP6 are exact in bfloat16. Values of NVFP4 have the amax of x as a factor, and are
        rounded to the dtype.
        """
        return self.codes(x).dequantize(x.dtype)

    def quantize(self, x: Tensor, **options: Any) -> HybridOperand:
        """Return the host's quantize() of the projected x."""
        return super().quantize(self.project(x), **options)

    def sums(self, x: Tensor, *unread: Any, **of_parts: Any) -> dict[Direction, Sums]:
        """Return the sums behind statistics(), with errors relative to x; waits for the device.

        They also count the tiles that the host encodes exactly: blocks under one scale whose values are the projected
        ones. Keys and states are not read: no format has random bits or a history.
        """
        values, sums = self.project(x), {}
        operands = super().quantize(values)
        for direction, of_x, of_grid in zip(DIRECTIONS, (x, x.t()), (values, values.t()), strict=True):
            format, buffers = getattr(self, direction), getattr(operands, direction).buffers
            own = gather_by_row(of_x, format, buffers).read()
            sums[direction] = TileSums(**vars(own), exact=exact_tiles(of_grid, format, buffers))
        return sums


def IdentityQuantizer(name: str = "bf16") -> HybridQuantizer:
    """Return a quantizer in high precision in both directions: "bf16", "fp16" or "fp32"."""
    return HybridQuantizer(Identity(name=name), Identity(name=name))


def is_low(quantizer: HybridQuantizer) -> bool:
    """Return whether a direction is in low precision. A user's quantizer class counts as low."""
    return type(quantizer) is not HybridQuantizer or not all(
        format.high_precision for format in (quantizer.rowwise, quantizer.columnwise)
    )
