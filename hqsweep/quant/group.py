"""Quantize the matrices of a group, each by itself, into packed operands. All members have equal quantizers.

A rank can also quantize its parts of the experts' matrices, with the bytes that the parts have in the wholes:
quantize_part() for all experts in one call, which needs the same few collectives as one expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey
from hqsweep.ops.layout import GroupLayout, Layout, Shapes, pack
from hqsweep.ops.quantize.amax import NO_SEARCH, Search, find_amax
from hqsweep.ops.quantize.request import Output
from hqsweep.ops.splits import Splits
from hqsweep.parallel.shards.shard_part import Part, check_part, has_amax, largest, quantize_part
from hqsweep.quant.delayed import SlotStates, grids_of
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand


class Wanted(NamedTuple):
    """The arguments of quantize_group after the first three."""

    rowwise: Output | None
    columnwise: Output | None
    keys: Sequence[RngKey | None] | None
    states: Sequence[SlotStates | None] | None
    by_rows: bool


def quantize_group(
    x: Tensor,
    splits: Splits | Shapes,
    quantizer: HybridQuantizer,
    *,
    rowwise: Output | None = "codes",
    columnwise: Output | None = "codes",
    keys: Sequence[RngKey | None] | None = None,
    states: Sequence[SlotStates | None] | None = None,
    by_rows: bool = False,
) -> HybridOperand:
    """Quantize [rows, width] and return operands with a layout. Member e has the bytes of quantizer.quantize(its rows).

    Each member has its own key and states. by_rows: see Target.
    With Shapes, x is flat, contiguous, and may have spare room. Members of one width are then quantized in one call, as
    with Splits. Others take a call each, unless only rowwise operands are wanted and Shapes.folded finds a matrix.
    A quantizer class with its own quantize() is called for each expert. Raises as quantize() does, naming the expert.
    """
    states = states if states and all(states) else None
    if isinstance(splits, Splits) and not has_own_quantize(quantizer):
        slots = {"key": keys, "states": states}
        return quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise, **slots, splits=splits, by_rows=by_rows)
    wanted = Wanted(rowwise=rowwise, columnwise=columnwise, keys=keys, states=states, by_rows=by_rows)
    if isinstance(splits, Shapes):
        return _of_shapes(x, splits, quantizer, wanted)
    return quantize_one_by_one(x, splits, quantizer, wanted, quantizer.quantize)


def has_own_quantize(quantizer: HybridQuantizer) -> bool:
    """Return whether the quantizer's class overrides HybridQuantizer.quantize. It is then called for each expert."""
    return type(quantizer).quantize is not HybridQuantizer.quantize


def _of_shapes(x: Tensor, shapes: Shapes, quantizer: HybridQuantizer, wanted: Wanted) -> HybridOperand:
    matrix = None if shapes.width is None else (shapes.width, shapes.splits)
    if matrix is None and wanted.rowwise and not wanted.columnwise and not has_own_quantize(quantizer):
        matrix = shapes.folded(quantizer.rowwise)
    if matrix is None:
        layouts = [shapes.layout(columnwise=direction == "columnwise") for direction in DIRECTIONS]
        return _packed(shapes.parts(x), layouts, quantizer, wanted, quantizer.quantize)
    width, splits = matrix
    operands = quantize_group(x[: shapes.total].view(splits.rows, width), splits, quantizer, **wanted._asdict())
    if width == shapes.width:
        return operands
    return replace(operands, rowwise=replace(operands.rowwise, layout=shapes.layout(columnwise=False)))


def quantize_one_by_one(
    x: Tensor, splits: Splits, quantizer: HybridQuantizer, wanted: Wanted, quantize: Callable[..., HybridOperand]
) -> HybridOperand:
    """Run quantize_group() with one call per expert: quantize(x[a:b], rowwise=, columnwise=, key=, states=).

    Waits for splits that only the device knows.
    """
    layouts = [GroupLayout.of(splits, x.shape[1], columnwise=d == "columnwise") for d in DIRECTIONS]
    return _packed([x[start:end] for start, end in splits.spans], layouts, quantizer, wanted, quantize)


def _packed(
    parts: Sequence[Tensor],
    layouts: Sequence[Layout],
    quantizer: HybridQuantizer,
    wanted: Wanted,
    quantize: Callable[..., HybridOperand],
) -> HybridOperand:
    """Quantize every part, and return the results in one memory."""
    nothing, directions = [None] * len(parts), {"rowwise": wanted.rowwise, "columnwise": wanted.columnwise}
    slots = zip(parts, wanted.keys or nothing, wanted.states or nothing, strict=True)
    members = []
    for expert, (part, key, states) in enumerate(slots):
        try:
            members.append(quantize(part, **directions, key=key, states=states))
        except UserError as error:
            raise UserError(f"expert {expert}: {error}") from None
    groups = {}
    for direction, layout in zip(DIRECTIONS, layouts, strict=True):
        operands, format = [getattr(member, direction) for member in members], getattr(quantizer, direction)
        results = [operand.buffers if isinstance(operand, Operand) else operand for operand in operands]
        packed = pack(results, format, layout, by_rows=wanted.by_rows)
        if isinstance(packed, dict):
            packed = Operand(format=format, layout=layout, dtype=parts[0].dtype, buffers=packed)
        groups[direction] = packed
    return HybridOperand(**groups)


def homogeneous(quantizers: Sequence[HybridQuantizer], where: str) -> HybridQuantizer:
    """Return the common quantizer of all experts, which are quantized and multiplied together.

    where: the module and the tensor, for messages. UserError names the first expert that differs from expert 0, and
    how:
    kind of quantizer, high precision, family or options of a format (tiles, elements, rounding), or columnwise source.
    Quantizers do not include states of delayed scaling and random bits; each expert has its own.
    """
    first = quantizers[0]
    for expert, other in enumerate(quantizers):
        difference = _difference(first, other)
        if difference:
            raise UserError(
                f"{where} of expert {expert} differs from that of expert 0 in {difference}: {other} and {first};"
                " give all experts of a grouped linear equal quantizers"
            )
    return first


def _difference(first: HybridQuantizer, other: HybridQuantizer) -> str | None:
    if type(first) is not type(other):
        return f"the kind of quantizer ({type(other).__name__} and {type(first).__name__})"
    for direction in DIRECTIONS:
        difference = _format_difference(getattr(first, direction), getattr(other, direction))
        if difference:
            return f"{difference} of its {direction} operand"
    if first.columnwise_source != other.columnwise_source:
        return "columnwise_source"
    return None if first == other else "its fields"


def _format_difference(first: Format, other: Format) -> str | None:
    if first.high_precision != other.high_precision:
        return "high precision"
    if type(first) is not type(other):
        return "the family"
    return None if first == other else "the options"


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
