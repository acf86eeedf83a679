"""Quantize one rank's parts of the experts' matrices, with the bytes that the parts have in the wholes.

quantize_part() for all experts in one call, which needs the same few collectives as one expert.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hqsweep.ops.members.splits import Splits
from hqsweep.ops.quantize.amax import NO_SEARCH, Search, find_amax
from hqsweep.parallel.shards.shard_part import Part, check_part, has_amax, largest, quantize_part
from hqsweep.quant.delayed import grids_of
from hqsweep.quant.group import Wanted, quantize_one_by_one
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand


def quantize_group_part(
    quantizer: HybridQuantizer, x: Tensor, splits: Splits, part: Part, wanted: Wanted
) -> HybridOperand:
    """quantize_group() for this rank's parts x [rows, cols] of the experts' matrices, each cut as `part` says.

    Member e has the bytes of quantize_part() of its rows. Experts whose rows are cut have equally many rows.

    Ranks agree on the amaxes of all experts at once. Formats that draw bits, and +row_scaled, take a call and a
    collective for each expert; the host waits there if only the device knows the splits. UserError as check_part raises
    it.
    """
    shape = (splits.equal, x.shape[1]) if part.axis == 0 else x.shape
    rowwise, columnwise, _, states, by_rows = wanted
    check_part(quantizer, torch.empty(shape, device="meta"), part, rowwise, columnwise)
    if quantizer.stochastic:
        return quantize_one_by_one(x, splits, quantizer, wanted, partial(quantize_part, quantizer, part=part))
    states = states and [replace(own, parts=part.group) for own in states]
    amaxes = _agreed(quantizer, x, splits, part, wanted)
    outputs = {"rowwise": rowwise, "columnwise": columnwise, "states": states, "by_rows": by_rows}
    return quantizer.quantize_members_under(x, amaxes, splits, **outputs)


def _agreed(
    quantizer: HybridQuantizer, x: Tensor, splits: Splits, part: Part, wanted: Wanted
) -> dict[str, Tensor | None]:
    """Direction -> the amaxes of every expert's whole matrix, where its format has one, as quantize_members_under()
    takes them."""
    column = quantizer.columnwise if wanted.columnwise else None
    decodes = column is not None and quantizer.columnwise_source == "rowwise_dequantized"
    row = quantizer.rowwise if wanted.rowwise or decodes else None
    amaxes = dict.fromkeys(DIRECTIONS)
    if has_amax(row):
        amaxes["rowwise"] = x.new_zeros(len(x) if row.row_scaled else splits.count, dtype=torch.float32)
    if has_amax(column):
        columns = splits.count * (x.shape[1] if column.row_scaled else 1)
        amaxes["columnwise"] = x.new_zeros(columns, dtype=torch.float32)
    rowwise = NO_SEARCH if amaxes["rowwise"] is None else Search(row, amaxes["rowwise"])
    columnwise = NO_SEARCH if amaxes["columnwise"] is None else Search(column, amaxes["columnwise"])
    decodes = decodes and columnwise is not NO_SEARCH
    find_amax(x, rowwise, NO_SEARCH if decodes else columnwise, splits=splits)
    whole_rows = row is not None and row.row_scaled and part.axis == 0
    of_row = [] if rowwise is NO_SEARCH or whole_rows else [amaxes["rowwise"]]
    whole_columns = column is not None and column.row_scaled and part.axis == 1
    of_column = [] if columnwise is NO_SEARCH or whole_columns else [amaxes["columnwise"]]
    largest(of_row if decodes else of_row + of_column, part.group)
    if decodes:
        known = amaxes["rowwise"]
        if row.delayed:
            known = torch.cat([grid["s"].view(-1) for grid in grids_of(wanted.states, {"rowwise": row})["rowwise"]])
        find_amax(x, Search(row, None, known), columnwise, columnwise_source="rowwise_dequantized", splits=splits)
        largest(of_column, part.group)
    return amaxes
