"""Quantize a matrix along its rows, its columns, or both in one read: check, dispatch, return."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, RngKey
from hqsweep.ops import kernel
from hqsweep.ops.dequantize import Backend, dequantize, exact_operand_of
from hqsweep.ops.plan import NO_KEY, Plan
from hqsweep.ops.request import (
    Output,
    Request,
    Source,
    as_matrix,
    check_given,
    check_shape,
    key_words,
    request_of,
    use_kernel,
)
from hqsweep.ops.stats import Statistics, gather

Made = dict[str, Tensor] | ExactOperand


class Quantized(NamedTuple):
    """What quantize() made; None for what was not asked for. The columnwise results are those of x.T."""

    rowwise: Made | None = None
    columnwise: Made | None = None
    rowwise_statistics: Statistics | None = None
    columnwise_statistics: Statistics | None = None


def quantize(
    x: Tensor,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: Source = "original",
    rowwise_output: Output = "codes",
    columnwise_output: Output = "codes",
    rowwise_key: RngKey | None = None,
    columnwise_key: RngKey | None = None,
    rowwise_grid: Buffers | None = None,
    columnwise_grid: Buffers | None = None,
    statistics: bool = False,
    backend: Backend = "auto",
) -> Quantized:
    """bf16, fp16 or fp32 [..., cols], leading axes folded to rows -> operands of the directions that have a format.

    Rowwise blocks run along cols; the columnwise operand encodes x.T [cols, rows]. columnwise_source
    "rowwise_dequantized" makes it from the decoded rowwise operand, rounded to x's dtype (rowwise is needed then).
    output "codes": the format's buffers; "exact": what gemm=exact multiplies, format.operand(codes), with a float32
    matrix from the CPU kernel and a bfloat16 one from CUDA and the reference (fp8_block+fp32_scale: always float32).
    grid: amaxes agreed on elsewhere (another rank, an earlier pass), of the tensor ({"g": ...}, or {"s": ...} of
    fp8_current and fp8_delayed, which must have one) or of the blocks; the kernels take those of the tensor, the
    reference all. A given "g" becomes part of the operand as it is, so it must not change afterwards. key: stream of
    +sr.
    statistics: sums of ops.stats, gathered while quantizing. backend "auto": the kernel where there is one, with the
    same bytes. Nothing waits for the device. UserError for a shape that a format cannot hold and for unknown names.
    """
    request = request_of(rowwise, columnwise, columnwise_source, rowwise_output, columnwise_output)
    x = as_matrix(x)
    check_shape(request, x)
    keys, grids = (rowwise_key, columnwise_key), (rowwise_grid, columnwise_grid)
    if request.delayed:
        check_given(request, grids)
    if rowwise is None and columnwise is None:
        return Quantized()
    if use_kernel(request, x, grids, backend):
        return _by_kernel(request, x, keys, grids, statistics)
    if rowwise and columnwise and backend == "auto":  # perhaps one of them has a kernel
        return _one_by_one(request, x, keys, grids, statistics)
    return _by_reference(request, x, keys, grids, statistics)


def encode(
    x: Tensor, format: Format, *, grid: Buffers | None = None, key: RngKey | None = None, backend: Backend = "auto"
) -> dict[str, Tensor]:
    """quantize() to the codes of one rowwise format."""
    return quantize(x, format, rowwise_grid=grid, rowwise_key=key, backend=backend).rowwise


def exact_operand(x: Tensor, format: Format, *, key: RngKey | None = None, backend: Backend = "auto") -> ExactOperand:
    """quantize() to the exact operand of one rowwise format."""
    return quantize(x, format, rowwise_output="exact", rowwise_key=key, backend=backend).rowwise


def find_amax(
    x: Tensor,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: Source = "original",
    rowwise_key: RngKey | None = None,
    rowwise_amax: Tensor | None = None,
    out_rowwise: Tensor | None = None,
    out_columnwise: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """out = max(out, global amax) in place: float32 [1, 1], or [operand rows, 1] for +row_scaled; NaN is ignored.

    Only directions with an `out` are scanned. With rowwise_dequantized the columnwise amax is that of the decoded
    rowwise operand, whose own global amax is given as rowwise_amax or found in out_rowwise (fp8_delayed: given).
    """
    request = request_of(
        rowwise if out_rowwise is not None or columnwise_source == "rowwise_dequantized" else None,
        columnwise if out_columnwise is not None else None, columnwise_source, "codes", "codes",
    )  # fmt: skip
    x = as_matrix(x)
    check_shape(request, x)
    check_amaxes(request, x, rowwise_amax, out_rowwise, out_columnwise)
    if not use_kernel(request, x, (None, None), backend):
        return _amax_by_reference(request, x, rowwise_key, rowwise_amax, (out_rowwise, out_columnwise))
    if out_rowwise is not None or out_columnwise is not None:
        kernel.find_amax(
            x, request.row_text, request.column_text, request.dequantized,
            key_words(request.row, rowwise_key) if request.dequantized else NO_KEY,
            rowwise_amax, out_rowwise, out_columnwise,
        )  # fmt: skip


def check_amaxes(
    request: Request,
    x: Tensor,
    given: Tensor | None,
    out_row: Tensor | None,
    out_column: Tensor | None,
    *,
    matrices: int = 1,
) -> None:
    """Where an amax is wanted there is a format that has one; where a row is decoded its amax is known. matrices: of a
    group, whose amaxes follow each other."""
    row, (tall, wide) = request.row, x.shape
    for name, p, out, rows in (
        ("rowwise", row, out_row, tall),
        ("columnwise", request.column, out_column, matrices * wide),
    ):
        if out is not None and (p is None or p.amax_name is None):
            raise UserError(f"find_amax: {p.text if p else 'no format'} has no global amax to find for out_{name}")
        if p:
            Plan.check_amax(p, f"out_{name}", out, rows, x, matrices)
    if row:
        Plan.check_amax(row, "rowwise_amax", given, tall, x, matrices)
    if request.dequantized and row.amax_name and given is None and (out_row is None or row.delayed):
        where = "rowwise_amax" if row.delayed else "rowwise_amax or out_rowwise"
        raise UserError(f"find_amax: decoding {row.text} rows needs their amax: give {where}")


def _by_kernel(request: Request, x: Tensor, keys, grids, statistics: bool) -> Quantized:
    row, column = request.row, request.column
    row_key = column_key = NO_KEY
    if request.stochastic:
        row_key, column_key = key_words(row, keys[0]), key_words(column, keys[1])
    row_amax = None if grids[0] is None or row is None else grids[0][row.amax_name]
    column_amax = None if grids[1] is None or column is None else grids[1][column.amax_name]
    made = kernel.quantize(
        x, request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact,
        row_key, column_key, row_amax, column_amax, statistics,
    )  # fmt: skip
    first = second = first_sums = second_sums = None
    if row is not None:
        first, first_sums, made = _take(made, row, request.row_exact, row_amax, x, x, statistics)
    if column is not None:
        source = None if request.dequantized or not statistics else x.t()
        second, second_sums, _ = _take(made, column, request.column_exact, column_amax, x, source, statistics)
    return Quantized(first, second, first_sums, second_sums)


def _take(
    made: list[Tensor], p: Plan, exact: bool, amax: Tensor | None, x: Tensor, source: Tensor | None, statistics: bool
):
    """One direction's result and statistics from the operator's outputs, and the outputs that are left."""
    kept = amax if p.amax_name == "g" else None
    if kept is not None and kept.dim() != 2:
        kept = kept.view(-1, 1)
    if exact:
        count = 2 if p.amax_name and kept is None else 1
        factor = made[1] if count == 2 else kept
        result = ExactOperand(made[0], factor, p.divisor)
    else:
        count = len(p.names) if kept is None else len(p.names) - 1
        result = dict(zip(p.names, made, strict=False))
        if kept is not None:
            result["g"] = kept
    if not statistics:
        return result, None, made[count:]
    sums = Statistics(
        sums=made[count],
        row_errors=made[count + 1],
        elements=x.numel(),
        x=source,
        format=p.format,
        buffers=None if exact else result,
    )
    return result, sums, made[count + 2 :]


def _one_by_one(request: Request, x: Tensor, keys, grids, statistics: bool) -> Quantized:
    """Each direction by itself, so that one without a kernel does not cost the other its own."""
    shape, format = tuple(x.shape), request.row.format
    options = {"rowwise_key": keys[0], "rowwise_grid": grids[0], "statistics": statistics}
    output = "exact" if request.row_exact and not request.dequantized else "codes"
    first = quantize(x, format, rowwise_output=output, **options)
    made = first.rowwise
    if request.dequantized:
        x = dequantize(made, format, shape, x.dtype)
        made = exact_operand_of(made, format, shape) if request.row_exact else made
    options = {"rowwise_key": keys[1], "rowwise_grid": grids[1], "statistics": statistics}
    output = "exact" if request.column_exact else "codes"
    second = quantize(x.t(), request.column.format, rowwise_output=output, **options)
    statistics = second.rowwise_statistics
    if statistics and request.dequantized:
        statistics = replace(statistics, x=None)
    return Quantized(made, second.rowwise, first.rowwise_statistics, statistics)


def _by_reference(request: Request, x: Tensor, keys, grids, statistics: bool) -> Quantized:
    results, sums = [None, None], [None, None]
    for i, (p, exact) in enumerate(((request.row, request.row_exact), (request.column, request.column_exact))):
        if p is None:
            continue
        format, source = p.format, x.t() if i else x
        buffers = format.encode(source, _full_grid(format, source, grids[i]), keys[i])
        shape = tuple(source.shape)
        results[i] = format.operand(buffers, shape) if exact else buffers
        if statistics:
            kept = {"keep_buffers": not exact, "keep_x": i == 0 or not request.dequantized}
            sums[i] = gather(source, format, buffers, columns=i == 1, **kept)
        if i == 0 and request.dequantized:
            x = format.decode(buffers, shape).to(x.dtype)
    return Quantized(*results, *sums)


def _full_grid(format: Format, x: Tensor, grid: Buffers | None) -> Mapping[str, Tensor] | None:
    """A given grid, with the amaxes that it leaves out."""
    return grid if grid is None else format.grid(x) | dict(grid)


def _amax_by_reference(request: Request, x: Tensor, key: RngKey | None, given: Tensor | None, outs) -> None:
    for i, (p, out) in enumerate(zip((request.row, request.column), outs, strict=True)):
        if p is None:
            continue
        format, source = p.format, x.t() if i else x
        if out is not None:
            out.copy_(torch.maximum(out, format.grid(source)[p.amax_name].view_as(out)))
        if i == 0 and request.dequantized:
            known = given if given is not None else out
            grid = format.grid(x) | ({p.amax_name: known.view(-1, 1)} if known is not None else {})
            x = format.decode(format.encode(x, grid, key), tuple(x.shape)).to(x.dtype)
