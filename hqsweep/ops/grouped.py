"""Quantize the rows of many experts, each as a matrix of its own, into packed operands."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, Identity, RngKey
from hqsweep.ops.dequantize import Backend
from hqsweep.ops.grouped_layout import GroupedExact, GroupLayout, Splits
from hqsweep.ops.kernel_grouped import key_table
from hqsweep.ops.plan import DTYPES, Plan, has_kernels, plan_of
from hqsweep.ops.quantize import Made, quantize
from hqsweep.ops.request import Output, Request, Source, request_of

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

    One call of the kernel for all experts, where there is one for the formats: it does not wait for splits that only
    the device knows, whose sizes nobody checks then. Otherwise a call for each expert, which waits.
    """
    given = {"columnwise_source": columnwise_source, "backend": backend}
    given |= {"rowwise_output": rowwise_output, "columnwise_output": columnwise_output}
    each = {"rowwise_key": rowwise_keys, "columnwise_key": columnwise_keys}
    each |= {"rowwise_grid": rowwise_grids, "columnwise_grid": columnwise_grids}
    each = {name: values for name, values in each.items() if values is not None}
    if splits.rows != x.shape[0] or not splits.count:
        got = f"splits of {splits.rows} rows over {splits.count} experts"
        raise UserError(f"quantize_grouped: {got} for a matrix of shape {tuple(x.shape)}")
    held = [isinstance(format, Identity) for format in (rowwise, columnwise)]
    if held[0] or (held[1] and columnwise_source == "original"):
        return _with_identity(x, splits, rowwise, columnwise, given, each)
    fused = None
    if backend != "reference":
        request = request_of(rowwise, columnwise, columnwise_source, rowwise_output, columnwise_output)
        fused = _by_kernel(request, x, splits, (rowwise_keys, columnwise_keys), (rowwise_grids, columnwise_grids))
    if fused is not None:
        return fused
    made = []
    for expert, (start, end) in enumerate(splits.spans):
        own = {name: values[expert] for name, values in each.items()}
        try:
            made.append(quantize(x[start:end], rowwise, columnwise, **given, **own))
        except UserError as error:
            raise UserError(f"expert {expert}: {error}") from None
    layouts = [GroupLayout(splits=splits, width=x.shape[1], columnwise=columnwise) for columnwise in (False, True)]
    row = pack([each.rowwise for each in made], rowwise, layouts[0])
    return GroupQuantized(row, pack([each.columnwise for each in made], columnwise, layouts[1]))


def _with_identity(
    x: Tensor,
    splits: Splits,
    rowwise: Format | None,
    columnwise: Format | None,
    given: dict[str, str],
    each: dict[str, Sequence],
) -> GroupQuantized:
    """Each direction by itself: an identity holds the matrix, whatever the splits, and the other may have a kernel."""
    source = x
    if given["columnwise_source"] != "original" and columnwise:
        source = x.to(rowwise.dtype).to(x.dtype)
    made = []
    for name, format, matrix in (("rowwise", rowwise, x), ("columnwise", columnwise, source)):
        if not isinstance(format, Identity):
            own = {f"{n}s": values for n, values in each.items() if n.startswith(name)}
            own |= {f"{name}_output": given[f"{name}_output"], "backend": given["backend"]}
            alone = quantize_grouped(matrix, splits, **{"rowwise": None, name: format}, **own) if format else None
            made.append(getattr(alone, name, None))
            continue
        layout = GroupLayout(splits=splits, width=x.shape[1], columnwise=name == "columnwise")
        made.append(_hold(matrix, format, layout, exact=given[f"{name}_output"] == "exact"))
    return GroupQuantized(*made)


def _hold(matrix: Tensor, format: Identity, layout: GroupLayout, *, exact: bool) -> GroupMade:
    """The operands of an identity, which lie by rows in both directions."""
    held = matrix.to(format.dtype).reshape(-1)
    if not exact:
        return {"q": held}
    held = held if format.name == "bf16" else held.float()
    by_rows = stored_by_rows(format, layout.columnwise)
    return GroupedExact(layout=layout, matrix=held, by_rows=by_rows, factor=None, per_row=False, divisor=1.0)


def _by_kernel(
    request: Request, x: Tensor, splits: Splits, keys: tuple[Keys, Keys], grids: tuple[Grids, Grids]
) -> GroupQuantized | None:
    """By one call, or None: without a kernel for all of it, or for arguments that a call for each expert refuses."""
    plans, exact = (request.row, request.column), (request.row_exact, request.column_exact)
    if plans == (None, None) or not request.kernels or not has_kernels(x.device.type):
        return None
    if x.dim() != 2 or x.dtype not in DTYPES or not _fits(request, x, splits):
        return None
    try:
        amaxes = [_amaxes(p, given) for p, given in zip(plans, grids, strict=True)]
        tables = [_table(p, given, x.device) for p, given in zip(plans, keys, strict=True)]
    except LookupError:
        return None
    steps = {key.step for p, given in zip(plans, keys, strict=True) if p and p.stochastic for key in given}
    if len(steps) > 1:
        return None
    made = torch.ops.hqsweep.quantize_grouped.default(
        x, splits.offsets(x.device), splits.sizes, request.row_text, request.column_text, request.dequantized, *exact,
        *tables, *steps or (0,), *amaxes,
    )  # fmt: skip
    results = []
    for columnwise, (p, amax) in enumerate(zip(plans, amaxes, strict=True)):
        if p is None:
            results.append(None)
            continue
        kept = {"g": amax} if amax is not None and p.amax_name == "g" else {}
        names = [name for name in p.names if name not in kept]
        if exact[columnwise]:
            names = ["matrix"] + [name for name in names if name == p.amax_name]
        result, made = dict(zip(names, made, strict=False)) | kept, made[len(names) :]
        if exact[columnwise]:
            layout = GroupLayout(splits=splits, width=x.shape[1], columnwise=bool(columnwise))
            result = GroupedExact(
                layout=layout, matrix=result["matrix"], by_rows=False, factor=result.get(p.amax_name),
                per_row=p.row_scaled, divisor=p.divisor,
            )  # fmt: skip
        results.append(result)
    return GroupQuantized(*results)


def _fits(request: Request, x: Tensor, splits: Splits) -> bool:
    """Whether blocks go into the matrix, and into each expert's rows where the host knows them."""
    down, across = request.multiples
    return x.shape[1] % across == 0 and all(size % down == 0 for size in splits.sizes or ())


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
    if keys is None or None in keys:
        raise LookupError
    return key_table(list(keys), device)


def pack(members: Sequence[Made | None], format: Format | None, layout: GroupLayout) -> GroupMade | None:
    """Results of one direction, in one memory; None for none."""
    if format is None or members[0] is None:
        return None
    by_rows = stored_by_rows(format, layout.columnwise)
    if not isinstance(members[0], ExactOperand):
        return {name: _flat([member[name] for member in members], by_rows) for name in format.layout}
    factors = [member.factor for member in members]
    return GroupedExact(
        layout=layout,
        matrix=_flat([member.matrix for member in members], by_rows),
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
