"""Targets of a quantizer's call, also with known amaxes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hqsweep.formats import Buffers, Format
from hqsweep.ops.quantize.request import NO_TARGET, Output, Source, Target
from hqsweep.ops.splits import Splits


def targets_of(
    quantizer: Any, rowwise: Output | None, columnwise: Output | None, by_rows: bool = False
) -> tuple[Target, Target]:
    """Return the targets of the wanted outputs."""
    needs_row = rowwise is not None or (columnwise and quantizer.columnwise_source == "rowwise_dequantized")
    row = Target(quantizer.rowwise, rowwise or "codes") if needs_row else NO_TARGET
    return row, Target(quantizer.columnwise, columnwise, by_rows=by_rows) if columnwise else NO_TARGET


def takes_amax_of_matrix(format: Format | None) -> bool:
    """Return whether the format's only amax belongs to the whole matrix, as it is or after a transform."""
    return format is not None and format.amax_name is not None and not (format.delayed or format.row_scaled)


def takes_amax_of_x(format: Format | None) -> bool:
    """Return whether the format's only amax belongs to the matrix as it is."""
    return takes_amax_of_matrix(format) and not format.rht


def signs_of(format: Format | None) -> bool | None:
    """Return the transform's signs for a columnwise format whose amax belongs to columns in groups of 16; else None.

    None too for signs that are drawn."""
    fixed = takes_amax_of_matrix(format) and format.rht == 16 and not format.rht_drawn
    return format.rht_signed if fixed else None


def with_amaxes(
    row: Target, column: Target, amaxes: Mapping[str, Tensor | None], splits: Splits | None = None
) -> tuple[Target, Target]:
    """Return the targets with the known amaxes of each direction, or of every member."""
    row_amax, column_amax = amaxes["rowwise"], amaxes["columnwise"]
    row = row if row_amax is None else row._replace(grid=_grid(row.format, row_amax, splits, False))
    column = column if column_amax is None else column._replace(grid=_grid(column.format, column_amax, splits, True))
    return row, column


def _grid(format: Format, amaxes: Tensor, splits: Splits | None, columnwise: bool) -> Buffers | list[Buffers]:
    """Return the grid of one matrix, or a list with each member's grid."""
    if splits is None:
        return {format.amax_name: amaxes}
    sizes = 1
    if format.row_scaled:
        sizes = amaxes.numel() // max(splits.count, 1) if columnwise else list(splits.host)
    of_members = amaxes.view(-1, 1).split(sizes)
    return [{format.amax_name: own} for own in of_members]


def under(target: Target, amax: Tensor) -> Target:
    """Return the target with a grid of that amax, if its format takes one."""
    return target._replace(grid={target.format.amax_name: amax}) if takes_amax_of_x(target.format) else target


def found_under(row: Target, column: Target, amaxes: Sequence[Tensor], source: Source) -> tuple[Target, Target]:
    """Return the targets with grids from the amaxes that takes_amaxes() names, for formats that take one."""
    row = under(row, amaxes[0])
    if source != "original":
        return row, column
    if signs_of(column.format) is None:
        return row, under(column, amaxes[0])
    return row, column._replace(grid={column.format.amax_name: amaxes[1]}) if len(amaxes) > 1 else column
