"""Quantize the rows of many experts, each as a matrix of its own, into packed operands."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, Identity, RngKey, RngKeys
from hqsweep.ops import kernel_grouped
from hqsweep.ops.dequantize import Backend, exact_operand_of
from hqsweep.ops.grouped_layout import GroupedExact, GroupLayout, Splits
from hqsweep.ops.member_layout import MemberLayout
from hqsweep.ops.plan import DTYPES, SHAPES_KEPT, Plan, has_kernels, plan_of
from hqsweep.ops.quantize import Made, quantize
from hqsweep.ops.request import NOTHING_GIVEN, Output, Request, Source, request_of

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
    return columnwise and format.high_precision


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
    by_rows: bool = False,
    backend: Backend = "auto",
) -> GroupQuantized:
    """bf16, fp16 or fp32 [rows, width] -> packed operands of the directions that have a format.

    Member e is ops.quantize(x[a:b], ...) of the rows of expert e, to the byte, under its own key and grid: blocks,
    tiles and global amaxes are its own. Arguments are those of ops.quantize, with a key and a grid for each expert.
    by_rows: exact columnwise members lie as [m_e, width], which torch._grouped_mm takes, and are read transposed.
    UserError as there, naming the expert.

    One call of the kernel for all experts, where there is one for the formats: it does not wait for splits that only
    the device knows, whose sizes nobody checks then. Otherwise a call for each expert, which waits.
    """
    if splits.rows != x.shape[0] or not splits.count:
        got = f"splits of {splits.rows} rows over {splits.count} experts"
        raise UserError(f"quantize_grouped: {got} for a matrix of shape {tuple(x.shape)}")
    keys, grids = (rowwise_keys, columnwise_keys), (rowwise_grids, columnwise_grids)
    request = request_of(rowwise, columnwise, columnwise_source, rowwise_output, columnwise_output)
    if backend != "reference" and not request.holds:
        fused = _by_kernel(request, x, splits, keys, grids, by_rows)
        if fused is not None:
            return fused
    given = {"columnwise_source": columnwise_source, "backend": backend}
    given |= {"rowwise_output": rowwise_output, "columnwise_output": columnwise_output}
    each = dict(zip(("rowwise_key", "columnwise_key", "rowwise_grid", "columnwise_grid"), (*keys, *grids), strict=True))
    each = {name: values for name, values in each.items() if values is not None}
    if request.holds:
        return _with_identity(x, splits, rowwise, columnwise, given, each, by_rows)
    made = []
    for expert, (start, end) in enumerate(splits.spans):
        own = {name: values[expert] for name, values in each.items()}
        try:
            made.append(quantize(x[start:end], rowwise, columnwise, **given, **own))
        except UserError as error:
            raise UserError(f"expert {expert}: {error}") from None
    layouts = [GroupLayout(splits=splits, width=x.shape[1], columnwise=columnwise) for columnwise in (False, True)]
    row = pack([each.rowwise for each in made], rowwise, layouts[0])
    return GroupQuantized(row, pack([each.columnwise for each in made], columnwise, layouts[1], by_rows=by_rows))


def _with_identity(
    x: Tensor,
    splits: Splits,
    rowwise: Format | None,
    columnwise: Format | None,
    given: dict[str, str],
    each: dict[str, Sequence],
    by_rows: bool,
) -> GroupQuantized:
    """Each direction by itself: an identity holds the matrix, whatever the splits, and the other may have a kernel."""
    source = x
    if given["columnwise_source"] != "original" and columnwise:
        source = x.to(rowwise.dtype).to(x.dtype)
    made = []
    for name, format, matrix in (("rowwise", rowwise, x), ("columnwise", columnwise, source)):
        if not (format and format.high_precision):
            own = {f"{n}s": values for n, values in each.items() if n.startswith(name)}
            own |= {f"{name}_output": given[f"{name}_output"], "backend": given["backend"], "by_rows": by_rows}
            alone = quantize_grouped(matrix, splits, **{"rowwise": None, name: format}, **own) if format else None
            made.append(getattr(alone, name, None))
            continue
        layout = GroupLayout(splits=splits, width=x.shape[1], columnwise=name == "columnwise")
        held = matrix.to(format.dtype).reshape(-1)
        made.append(held_exact(held, format, layout) if given[f"{name}_output"] == "exact" else {"q": held})
    return GroupQuantized(*made)


def held_exact(held: Tensor, format: Identity, layout: MemberLayout) -> GroupedExact:
    """What gemm=exact multiplies of the operands of an identity, which lie by rows in both directions."""
    held = held if format.name == "bf16" else held.float()
    by_rows = stored_by_rows(format, layout.columnwise)
    return GroupedExact(layout=layout, matrix=held, by_rows=by_rows, factor=None, per_row=False, divisor=1.0)


def _by_kernel(
    request: Request, x: Tensor, splits: Splits, keys: tuple[Keys, Keys], grids: tuple[Grids, Grids], by_rows: bool
) -> GroupQuantized | None:
    """By one call, or None: without a kernel for all of it, or for arguments that a call for each expert refuses."""
    row, column, device = request.row, request.column, x.device
    if not _suits(request, x.dtype, x.shape, device.type) or not fits(request, x, splits):
        return None
    row_amax = column_amax = row_table = column_table = None
    step = 0
    if request.stochastic or request.delayed or grids != NOTHING_GIVEN:
        try:
            row_amax, column_amax = _amaxes(row, grids[0]), _amaxes(column, grids[1])
            row_table, column_table = _table(row, keys[0], device), _table(column, keys[1], device)
        except LookupError:
            return None
        drawn = [own for p, own in zip((row, column), keys, strict=True) if p and p.stochastic]
        steps = {step for own in drawn for step in _steps(own)}
        if len(steps) > 1:
            return None
        step = next(iter(steps), 0)
    made = kernel_grouped.quantize_grouped(
        x, splits.offsets(device), splits.sizes, request.row_text, request.column_text, request.dequantized,
        request.row_exact, request.column_exact, row_table, column_table, step, row_amax, column_amax, by_rows,
    )  # fmt: skip
    first = second = None
    if row is not None:
        layout = splits.layout(x.shape[1], columnwise=False)
        first, made = _take(made, row, request.row_exact, row_amax, layout, False)
    if column is not None:
        layout = splits.layout(x.shape[1], columnwise=True)
        second, _ = _take(made, column, request.column_exact, column_amax, layout, by_rows)
    return GroupQuantized(first, second)


def _take(
    made: list[Tensor], p: Plan, exact: bool, amax: Tensor | None, layout: GroupLayout, by_rows: bool
) -> tuple[GroupMade, list[Tensor]]:
    """One direction's result from the operator's outputs, and the outputs that are left."""
    kept = amax if p.amax_name == "g" else None
    if not exact:
        names = p.names if kept is None else [name for name in p.names if name != "g"]
        result = dict(zip(names, made, strict=False))
        return result if kept is None else result | {"g": kept}, made[len(names) :]
    count = 2 if p.amax_name and kept is None else 1
    factor = made[1] if count == 2 else kept
    result = GroupedExact(
        layout=layout, matrix=made[0], by_rows=by_rows, factor=factor, per_row=p.row_scaled, divisor=p.divisor
    )
    return result, made[count:]


@lru_cache(maxsize=SHAPES_KEPT)
def _suits(request: Request, dtype: torch.dtype, shape: torch.Size, device_type: str) -> bool:
    """Whether there is a kernel for matrices of this shape."""
    wanted = request.kernels and (request.row is not None or request.column is not None)
    return wanted and has_kernels(device_type) and dtype in DTYPES and len(shape) == 2


def fits(request: Request, x: Tensor, splits: Splits) -> bool:
    """Whether blocks go into the matrix, and into each expert's rows where the host knows them."""
    down, across = request.multiples
    return x.shape[1] % across == 0 and (down == 1 or splits.sizes is None or splits.divisor % down == 0)


def _amaxes(p: Plan | None, grids: Grids) -> Tensor | None:
    """Given global amaxes of all experts, one after the other; LookupError for grids that the kernel does not take."""
    if p is None or grids is None or all(grid is None for grid in grids):
        if p is not None and p.delayed:
            raise LookupError
        return None
    if any(grid is None or set(grid) != {p.amax_name} for grid in grids):
        raise LookupError
    return torch.cat([grid[p.amax_name].reshape(-1) for grid in grids])


def _table(p: Plan | None, keys: Keys, device: torch.device) -> Tensor | None:
    if p is None or not p.stochastic:
        return None
    if keys is None or (not isinstance(keys, RngKeys) and None in keys):
        raise LookupError
    return kernel_grouped.key_table(keys, device)


def _steps(keys: Sequence[RngKey]) -> set[int]:
    return {keys.step} if isinstance(keys, RngKeys) else {key.step for key in keys}


def exact_group(buffers: Buffers, format: Format, layout: MemberLayout) -> GroupedExact:
    """Packed buffers -> what gemm=exact multiplies, by rows: exact_operand_of each member, to the byte, in one launch
    where there is a kernel and members have one width; nothing waits for splits then."""
    p, first = plan_of(format), next(iter(buffers.values()))
    if format.high_precision:
        return held_exact(buffers["q"], format, layout)
    if p.spec is None or not has_kernels(first.device.type) or not isinstance(layout, GroupLayout):
        members = member_buffers(buffers, format, layout)
        exact = [exact_operand_of(own, format, shape) for own, shape in zip(members, layout.shapes, strict=True)]
        return pack(exact, format, layout, by_rows=layout.columnwise)
    matrix = kernel_grouped.dequantize_grouped(
        [buffers[name] for name in p.names], p.text, layout.columnwise, layout.splits.offsets(first.device),
        layout.splits.rows, layout.width, True, Plan.exact_dtype(p, first.is_cuda),
    )  # fmt: skip
    return GroupedExact(
        layout=layout, matrix=matrix, by_rows=layout.columnwise, factor=buffers.get(p.amax_name),
        per_row=p.row_scaled, divisor=p.divisor,
    )  # fmt: skip


def member_buffers(buffers: Buffers, format: Format, layout: MemberLayout) -> list[dict[str, Tensor]]:
    """Those of each expert, as views; waits as Splits.host does."""
    by_rows, views = stored_by_rows(format, layout.columnwise), {}
    for name in format.layout:
        views[name] = layout.views(buffers[name], layout.buffer_shapes(format, name), by_rows=by_rows)
    return [dict(zip(views, own, strict=True)) for own in zip(*views.values(), strict=True)]


def pack(
    members: Sequence[Made | None], format: Format | None, layout: MemberLayout, *, by_rows: bool = False
) -> GroupMade | None:
    """Results of one direction, in one memory, zeros behind them where splits leave rows over; None for none. by_rows:
    exact columnwise ones as [m_e, width]."""
    if format is None or members[0] is None:
        return None
    by_rows = by_rows and isinstance(members[0], ExactOperand) and layout.columnwise
    by_rows = by_rows or stored_by_rows(format, layout.columnwise)
    if not isinstance(members[0], ExactOperand):
        return {
            name: _flat([member[name] for member in members], by_rows, layout.least(buffer))
            for name, buffer in format.layout.items()
        }
    p, factors = plan_of(format), [member.factor for member in members]
    return GroupedExact(
        layout=layout,
        matrix=_flat([member.matrix for member in members], by_rows, layout.least(None)),
        by_rows=by_rows,
        factor=None if factors[0] is None else _flat(factors, False, layout.least(format.layout[p.amax_name])),
        per_row=p.row_scaled,
        divisor=members[0].divisor,
    )


def _flat(tensors: list[Tensor], by_rows: bool, least: int) -> Tensor:
    """One after the other, then zeros up to the least number of entries."""
    count, start = sum(t.numel() for t in tensors), 0
    if not by_rows:
        alike = count >= least and len({t.shape[1:] for t in tensors}) == 1  # then strides cost no launch each
        parts = tensors if alike else [*(t.reshape(-1) for t in tensors), tensors[0].new_zeros(max(least - count, 0))]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1)
    flat = tensors[0].new_empty(max(count, least))
    flat[count:].zero_()
    for t in tensors:
        flat[start : start + t.numel()].view(t.shape[::-1]).copy_(t.t())
        start += t.numel()
    return flat
