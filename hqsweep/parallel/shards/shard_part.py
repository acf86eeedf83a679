"""Quantize one rank's part of a matrix, with the bytes that the part has in the whole.

The ranks of a group hold equal parts of a matrix, cut along one axis. No block may cross a cut. Amaxes of whole
tensors, and of whole rows, are the largest over the group. Random bits are keyed by the element's place in the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Format, RngKey
from hqsweep.ops.quantize.amax import NO_SEARCH, Search, find_amax
from hqsweep.ops.quantize.request import Output
from hqsweep.ops.stats import Sums, is_below
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.wire.collectives import maximum_
from hqsweep.parallel.wire.exchange import Area
from hqsweep.quant.delayed import SlotStates, grids_of
from hqsweep.quant.hybrid import Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, joined

Mode = Literal["column", "row"]
CUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "column": {"weight": 0, "output": 1, "grad_output": 1},
        "row": {"input": 1, "weight": 1, "grad_input": 1},
    }
)
"""How ranks share a linear -> tensor -> the axis along which ranks have parts of its matrix. Other tensors are whole on
each rank, or split by tokens."""
AXES = ("rows", "columns")


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """How the ranks of `group` share a matrix, and so where this rank's part lies."""

    group: ProcessGroup
    axis: int
    """The axis of the matrix that is cut: 0 for rows, 1 for columns."""
    runs: int = 1
    """The number of equal pieces of each part, which are apart in the whole."""

    def placed(self, area: Area, shape: tuple[int, int]) -> list[tuple[Area, Place]]:
        """The pieces of an area of this rank's part, each with its place in the whole. shape: the part's.

        An area without elements is one piece.
        """
        ranks, size = self.group.size(), shape[self.axis] // self.runs
        whole = [length * ranks if axis == self.axis else length for axis, length in enumerate(shape)]
        placed = []
        for run in range(self.runs):
            spans = [(0, length) for length in shape]
            spans[self.axis] = run * size, (run + 1) * size
            own = area.common(Area(*spans[0], *spans[1]))
            start = [own.first_row, own.first_col]
            start[self.axis] += (run * (ranks - 1) + self.group.rank()) * size
            if own.size:
                placed.append((own, Place(*start, *whole)))
        return placed or [(area, Place(0, 0, *whole))]

    def quantize(self, quantizer: HybridQuantizer, x: Tensor, **options: Any) -> HybridOperand:
        """quantize_part() of this part x."""
        return quantize_part(quantizer, x, self, **options)

    def sums(
        self, quantizer: HybridQuantizer, x: Tensor, key: RngKey | None = None, states: SlotStates | None = None
    ) -> dict[Direction, Sums]:
        """part_sums() of this part x."""
        return part_sums(quantizer, x, self, key, states)

    def own(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's part of a whole tensor that is cut along this axis as this says."""
        pieces = whole.unflatten(axis, (self.runs, self.group.size(), -1))
        return pieces.select(axis + 1, self.group.rank()).flatten(axis, axis + 1)

    def __deepcopy__(self, memo: Any) -> "Part":
        return self  # a group has no copies


def quantize_part(
    quantizer: HybridQuantizer,
    x: Tensor,
    part: Part,
    *,
    rowwise: Output | None = None,
    columnwise: Output | None = None,
    key: RngKey | None = None,
    states: SlotStates | None = None,
) -> HybridOperand:
    """quantizer.quantize() for this rank's part x [rows, cols], with the bytes of the whole's operands.

    A collective where a format has an amax of the whole. UserError as check_part raises it.
    """
    check_part(quantizer, x, part, rowwise, columnwise)
    decodes = columnwise is not None and quantizer.columnwise_source == "rowwise_dequantized"
    row = quantizer.rowwise if rowwise or decodes else None
    column = quantizer.columnwise if columnwise else None
    states = states and replace(states, parts=part.group)
    pieces = _placed(x, part) if quantizer.stochastic else [(x, None)]
    amaxes = _agreed(quantizer, pieces, part, row, column, key, states)
    outputs = {"rowwise": rowwise, "columnwise": columnwise, "key": key, "states": states}
    operands = [
        quantizer.quantize_under(piece, own, place=place, **outputs)
        for (piece, place), own in zip(pieces, amaxes, strict=True)
    ]
    return joined(operands, part.axis)


def part_sums(
    quantizer: HybridQuantizer, x: Tensor, part: Part, key: RngKey | None = None, states: SlotStates | None = None
) -> dict[Direction, Sums]:
    """quantizer.sums() for this rank's part x [rows, cols], quantized as by quantize_part.

    A collective where a format has an amax of the whole. UserError as check_part raises it.
    """
    check_part(quantizer, x, part, "codes", "codes")
    states = states and replace(states, parts=part.group, record=False)
    pieces = _placed(x, part) if quantizer.stochastic else [(x, None)]
    amaxes = _agreed(quantizer, pieces, part, quantizer.rowwise, quantizer.columnwise, key, states)
    totals: dict[Direction, Sums] = {}
    for (piece, place), own in zip(pieces, amaxes, strict=True):
        for direction, sums in quantizer.sums(piece, key, states, amaxes=own, place=place).items():
            below, before = is_below(part.axis, direction), totals.get(direction)
            totals[direction] = sums if before is None else before.joined(sums, below=below)
    return totals


def _placed(x: Tensor, part: Part) -> list[tuple[Tensor, Place]]:
    """The pieces of a part, each with its place in the whole."""
    rows, cols = x.shape
    own = Area(0, rows, 0, cols)
    return [(area.of(x, own), place) for area, place in part.placed(own, (rows, cols))]


def check_part(
    quantizer: HybridQuantizer, x: Tensor, part: Part, rowwise: Output | None, columnwise: Output | None
) -> None:
    """UserError for a part that cuts a block of a wanted operand, and for a class of quantizer other than
    HybridQuantizer."""
    if type(quantizer) is not HybridQuantizer:
        raise UserError(f"{quantizer} is of a class of its own, which knows no parts over ranks; take HybridQuantizer")
    if cut := cut_block(quantizer, x.shape, part, rowwise, columnwise):
        format, block = cut
        raise UserError(
            f"a rank's part has {x.shape[part.axis] // part.runs} {AXES[part.axis]} of {tuple(x.shape)}, which cut a"
            f" block of {format}; take sizes whose parts are multiples of {block}, or fewer ranks"
        )


def cut_block(
    quantizer: HybridQuantizer, shape: Sequence[int], part: Part, rowwise: Output | None, columnwise: Output | None
) -> tuple[Format, int] | None:
    """(format, size): the first format whose blocks a part of that shape cuts, and the blocks' size along the cut; or
    None."""
    size = shape[part.axis] // part.runs
    return next((each for each in _blocks(quantizer, part, rowwise, columnwise) if size % each[1]), None)


def is_part(
    quantizer: HybridQuantizer, shape: Sequence[int], part: Part, rowwise: Output | None, columnwise: Output | None
) -> bool:
    """Whether check_part accepts a part of that shape."""
    return type(quantizer) is HybridQuantizer and not cut_block(quantizer, shape, part, rowwise, columnwise)


def is_alone(
    quantizer: HybridQuantizer, shape: Sequence[int], part: Part, rowwise: Output | None, columnwise: Output | None
) -> bool:
    """Whether quantize_part() of a part of that shape is quantizer.quantize().

    It is if all scales belong to blocks that no cut crosses, and no random bits are drawn.
    """
    if not is_part(quantizer, shape, part, rowwise, columnwise) or quantizer.stochastic:
        return False
    return all(format.amax_name is None for format, _ in _blocks(quantizer, part, rowwise, columnwise))


def _blocks(
    quantizer: HybridQuantizer, part: Part, rowwise: Output | None, columnwise: Output | None
) -> list[tuple[Format, int]]:
    """(format, size) of each format that is encoded. size: how many elements along the cut must stay together."""
    row = rowwise or (columnwise and quantizer.columnwise_source == "rowwise_dequantized")
    wanted = ((quantizer.rowwise, row, part.axis), (quantizer.columnwise, columnwise, 1 - part.axis))
    return [(format, _block(format, axis)) for format, needed, axis in wanted if needed]


def _block(format: Format, axis: int) -> int:
    """The most elements along an axis of the operand that share an entry of some buffer, or a transform. Entries of the
    whole axis do not count."""
    sizes = [(buffer.rows, buffer.cols)[axis] for buffer in format.layout.values()]
    return max(format.rht if axis else 1, *(size if size != WHOLE else 1 for size in sizes))


def has_amax(format: Format | None) -> bool:
    """Whether a format scales by an amax of the matrix, or of its rows, that this call finds."""
    return format is not None and format.amax_name is not None and not format.delayed


def _agreed(
    quantizer: HybridQuantizer,
    pieces: list[tuple[Tensor, Place | None]],
    part: Part,
    row: Format | None,
    column: Format | None,
    key: RngKey | None,
    states: SlotStates | None,
) -> list[dict[str, Tensor | None]]:
    """For each piece: direction -> the amax of the whole, where its format has one.

    All pieces share one amax. Amaxes of rows (of columns for a columnwise operand) are an exception where these are
    cut: each piece then has the amaxes of its own.
    """
    first = pieces[0][0]
    row_amaxes, of_row = _zeros(row, first, 0, part.axis, len(pieces))
    column_amaxes, of_column = _zeros(column, first, 1, part.axis, len(pieces))
    decodes = column_amaxes[0] is not None and quantizer.columnwise_source == "rowwise_dequantized"
    keys = [quantizer.direction_keys(key, place) for _, place in pieces]
    columns = [
        NO_SEARCH if amax is None else Search(column, amax, key=own["columnwise"])
        for amax, own in zip(column_amaxes, keys, strict=True)
    ]
    for (x, _), row_amax, columnwise, own in zip(pieces, row_amaxes, columns, keys, strict=True):
        rowwise = NO_SEARCH if row_amax is None else Search(row, row_amax, key=own["rowwise"])
        find_amax(x, rowwise, NO_SEARCH if decodes else columnwise)
    largest(of_row if decodes else of_row + of_column, part.group)
    if decodes:
        delayed = grids_of([states], {"rowwise": row})["rowwise"][0]["s"] if row.delayed else None
        for (x, _), row_amax, columnwise, own in zip(pieces, row_amaxes, columns, keys, strict=True):
            by = Search(row, None, delayed if row.delayed else row_amax, own["rowwise"])
            find_amax(x, by, columnwise, columnwise_source="rowwise_dequantized")
        largest(of_column, part.group)
    pairs = zip(row_amaxes, column_amaxes, strict=True)
    return [{"rowwise": row_amax, "columnwise": column_amax} for row_amax, column_amax in pairs]


def _zeros(
    format: Format | None, x: Tensor, axis: int, cut: int, pieces: int
) -> tuple[Sequence[Tensor | None], list[Tensor]]:
    """Return an amax of 0 for each piece, shaped as x, and those on which ranks must agree.

    axis: the axis of x along which rows of the operand follow each other. cut: the axis that ranks share out.
    """
    if not has_amax(format):
        return [None] * pieces, []
    own = format.row_scaled and axis == cut  # a row is on one rank, and in one piece
    amax = x.new_zeros(((pieces if own else 1) * (x.shape[axis] if format.row_scaled else 1), 1), dtype=torch.float32)
    return (amax.chunk(pieces), []) if own else ([amax] * pieces, [amax])


def largest(amaxes: list[Tensor], group: ProcessGroup) -> None:
    """Replace each amax by the largest over the group, in one collective."""
    if group.size() > 1:
        maximum_(amaxes, group)
