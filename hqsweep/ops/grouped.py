"""Quantize the rows of many experts, each as a matrix of its own, into packed operands."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, Identity, RngKey
from hqsweep.ops.dequantize import Backend
from hqsweep.ops.grouped_layout import GroupedExact, GroupLayout, Splits
from hqsweep.ops.plan import plan_of
from hqsweep.ops.quantize import Made, quantize
from hqsweep.ops.request import Output, Source

GroupMade = dict[str, Tensor] | GroupedExact
Keys = Sequence[RngKey | None] | None
Grids = Sequence[Buffers | None] | None


class GroupQuantized(NamedTuple):
    """What quantize_grouped() made; None for what was not asked for. Codes are packed buffers, flat."""

    rowwise: GroupMade | None = None
    columnwise: GroupMade | None = None


def stored_by_rows(format: Format, columnwise: bool) -> bool:
    """Whether members lie in memory as their rows [m, width], and columnwise ones are read transposed: an identity
    holds the matrix that it is given, and so both directions of it in one memory."""
    return columnwise and isinstance(format, Identity)


def quantize_grouped(
    x: Tensor,
    splits: Splits,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: Source = "original",
    rowwise_output: Output = "codes",
    columnwise_output: Output = "codes",
    rowwise_keys: Keys = None,
    columnwise_keys: Keys = None,
    rowwise_grids: Grids = None,
    columnwise_grids: Grids = None,
    backend: Backend = "auto",
) -> GroupQuantized:
    """bf16, fp16 or fp32 [rows, width] -> packed operands of the directions that have a format.

    Member e is ops.quantize(x[a:b], ...) of the rows of expert e, to the byte, under its own key and grid: blocks,
    tiles and global amaxes are its own. Arguments are those of ops.quantize, with a key and a grid for each expert.
    UserError as there, naming the expert.

    A call for each expert: splits that only a device knows are waited for.
    """
    given = {"columnwise_source": columnwise_source, "backend": backend}
    given |= {"rowwise_output": rowwise_output, "columnwise_output": columnwise_output}
    each = {"rowwise_key": rowwise_keys, "columnwise_key": columnwise_keys}
    each |= {"rowwise_grid": rowwise_grids, "columnwise_grid": columnwise_grids}
    each = {name: values for name, values in each.items() if values is not None}
    if splits.rows != x.shape[0] or not splits.count:
        got = f"splits of {splits.rows} rows over {splits.count} experts"
        raise UserError(f"quantize_grouped: {got} for a matrix of shape {tuple(x.shape)}")
    made = []
    for expert, (start, end) in enumerate(splits.spans):
        own = {name: values[expert] for name, values in each.items()}
        try:
            made.append(quantize(x[start:end], rowwise, columnwise, **given, **own))
        except UserError as error:
            raise UserError(f"expert {expert}: {error}") from None
    layouts = [GroupLayout(splits=splits, width=x.shape[1], columnwise=columnwise) for columnwise in (False, True)]
    row = pack([each.rowwise for each in made], rowwise, layouts[0], x)
    whole = x if columnwise_source == "original" else None
    return GroupQuantized(row, pack([each.columnwise for each in made], columnwise, layouts[1], whole))


def pack(
    members: Sequence[Made | None], format: Format | None, layout: GroupLayout, source: Tensor | None = None
) -> GroupMade | None:
    """Results of one direction, in one memory.

    source: the matrix that they were made from, which an identity goes on to hold. None for none.
    """
    if format is None or members[0] is None:
        return None
    by_rows = stored_by_rows(format, layout.columnwise)
    held = source.to(format.dtype).reshape(-1) if isinstance(format, Identity) and source is not None else None
    if not isinstance(members[0], ExactOperand):
        names = format.layout if held is None else ()
        packed = {name: _flat([member[name] for member in members], by_rows) for name in names}
        return packed if held is None else {"q": held}
    if held is None:
        matrix = _flat([member.matrix for member in members], by_rows)
    else:
        matrix = held if format.name == "bf16" else held.float()
    factors = [member.factor for member in members]
    return GroupedExact(
        layout=layout,
        matrix=matrix,
        by_rows=by_rows,
        factor=None if factors[0] is None else _flat(factors, False),
        per_row=plan_of(format).row_scaled,
        divisor=members[0].divisor,
    )


def _flat(tensors: list[Tensor], by_rows: bool) -> Tensor:
    """One after the other."""
    if len(tensors) == 1 and not by_rows:
        return tensors[0].reshape(-1)
    flat, start = tensors[0].new_empty(sum(t.numel() for t in tensors)), 0
    for t in tensors:
        part = t.t() if by_rows else t
        flat[start : start + t.numel()].view(part.shape).copy_(part)
        start += t.numel()
    return flat
