"""Quantize one matrix along rows, columns, or both in one pass; or many matrices whose rows follow each other.

quantize_plain() serves tensors that need no keys and no amaxes, by one kernel call. Most calls of a training are of
this kind. Everything that depends on the size alone is computed once, so that the host only allocates and launches.
quantize() handles all other calls, and gives the same bytes.

The reference of the kernels, by the formats in torch, defines the bytes, and serves identities.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, RngKey
from hqsweep.memo import memo
from hqsweep.ops.layout import GroupLayout, Result, held_exact, pack, take
from hqsweep.ops.library import direct, extension, has_kernels, where
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.dequantize import dequantize, exact_operand_of
from hqsweep.ops.quantize.kernels import DTYPES, KernelSpec
from hqsweep.ops.quantize.nonfinite import NOBODY, TRACED, current, now, see
from hqsweep.ops.quantize.operators import NO_STREAM, Outputs, direction, outputs_of
from hqsweep.ops.quantize.request import (
    NO_INPUTS,
    NO_TARGET,
    Backend,
    Inputs,
    Output,
    Request,
    Source,
    Target,
    as_matrix,
    as_target,
    check_backend,
    check_given,
    check_shape,
    kernel_takes,
    matrix_inputs,
    member_inputs,
    of_member,
    request_of,
    text_of,
    use_kernel,
)
from hqsweep.ops.splits import Splits
from hqsweep.ops.stats import Statistics, gather, gather_by_row


def by_reference(request: Request, x: Tensor, row: Target, column: Target, statistics: bool) -> tuple:
    """Return the fields of Quantized for one matrix."""
    results, sums = [None, None], [None, None]
    for i, (spec, exact, target) in enumerate(
        ((request.row, request.row_exact, row), (request.column, request.column_exact, column))
    ):
        if spec is None:
            continue
        format, source = target.format, x.t() if i else x  # torch.compile cannot call spec.format's methods
        buffers = format.encode(source, _full_grid(format, source, target), target.key)
        shape = tuple(source.shape)
        results[i] = format.operand(buffers, shape) if exact else buffers
        if statistics:
            keep_x = i == 0 or not request.dequantized
            if format.high_precision:
                sums[i] = gather_by_row(source, format, buffers, keep_x=keep_x)
            else:
                options = {"keep_buffers": not exact, "keep_x": keep_x, "key": target.key}
                sums[i] = gather(source, format, buffers, columns=i == 1, **options)
        if i == 0 and request.dequantized:
            x = format.decode(buffers, shape).to(x.dtype)
    return *results, *sums


def _full_grid(format: Format, x: Tensor, target: Target) -> Mapping[str, Tensor] | None:
    """Return a given grid, completed by the amaxes that it lacks."""
    return target.grid if target.grid is None else format.grid(x, target.key) | dict(target.grid)


class Quantized(NamedTuple):
    """Results of quantize(); None for unwanted ones. Columnwise results encode x.T."""

    rowwise: Result | None = None
    columnwise: Result | None = None
    rowwise_statistics: Statistics | None = None
    columnwise_statistics: Statistics | None = None


def quantize(
    x: Tensor,
    rowwise: Format | Target | None,
    columnwise: Format | Target | None = None,
    *,
    columnwise_source: Source = "original",
    splits: Splits | None = None,
    statistics: bool = False,
    backend: Backend = "auto",
) -> Quantized:
    """Quantize bf16, fp16 or fp32 [..., cols] in each direction that has a format. Leading axes are folded to rows.

    Rowwise blocks run along cols; the columnwise operand encodes x.T [cols, rows]. With columnwise_source
    "rowwise_dequantized" it encodes the decoded rowwise operand, rounded to x's dtype; rowwise is then required.

    A Target says more than a format. output "codes": the format's buffers. output "exact": the matrix that gemm=exact
    multiplies, format.operand(codes). Its dtype is float32 from the CPU kernel, bfloat16 from CUDA and the reference,
    and always float32 for fp8_block+fp32_scale. grid: amaxes found elsewhere (another rank, an earlier pass), for the
    tensor ({"g": ...}, or {"s": ...} for fp8_current and fp8_delayed, which needs one) or for the blocks. Kernels take
    tensor amaxes only, the reference takes all. A given "g" becomes part of the operand, so it must not change
    afterwards.

    statistics: also gather the sums of ops.stats. backend "auto": the kernel if there is one; the bytes are the same.
    Nothing waits for the device.

    splits: the rows belong to many matrices, the members. Each member is quantized, to the byte, as x[a:b] alone, under
    its own key and grid. Results are packed (ops.layout). If the formats have a kernel, one call serves all. It
    does not wait for splits on the device, and does not check their sizes. Otherwise each member takes a call, which
    waits.

    Raises:
        UserError: for a shape that a format cannot hold, unknown names, or statistics with splits; it names the member.
    """
    row = rowwise if type(rowwise) is Target else as_target(rowwise)
    column = columnwise if type(columnwise) is Target else as_target(columnwise) if columnwise else NO_TARGET
    request = request_of(text_of(row.format), text_of(column.format), columnwise_source, row.output, column.output)
    x = as_matrix(x)
    if splits is not None:
        return _members(request, x, splits, row, column, statistics, backend)
    check_shape(request, x.shape)
    if request.delayed:
        check_given(request, row.grid, column.grid)
    if request.row is None and request.column is None:
        return Quantized()
    if use_kernel(request, x, backend, row.grid, column.grid):
        return _by_kernel(request, x, matrix_inputs(request, row, column), statistics)
    # Only one may have a kernel. The order of sums in statistics belongs to a direction by itself.
    if request.row and request.column and backend == "auto" and (request.some_kernel or statistics):
        return _one_by_one(request, x, row, column, statistics)
    if current() not in (NOBODY, TRACED):
        for spec, columnwise in ((request.row, False), (request.column, True)):
            if spec and not (spec.format.high_precision or statistics or (columnwise and request.dequantized)):
                see(x, columnwise)
    return Quantized(*by_reference(request, x, row, column, statistics))


def encode(
    x: Tensor, format: Format, *, grid: Buffers | None = None, key: RngKey | None = None, backend: Backend = "auto"
) -> dict[str, Tensor]:
    """Return the codes of x in one rowwise format, by quantize()."""
    return quantize(x, Target(format, key=key, grid=grid), backend=backend).rowwise


def _by_kernel(request: Request, x: Tensor, inputs: Inputs, statistics: bool) -> Quantized:
    outputs = operators.quantize(
        x, request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact,
        inputs.row_key, inputs.column_key, inputs.row_amax, inputs.column_amax, statistics,
        None, None, None, None, False, inputs.step, current(),
    )  # fmt: skip
    return quantized_of(request, outputs, inputs, x if statistics else None)


def quantized_of(
    request: Request, outputs: list[Tensor], inputs: Inputs = NO_INPUTS, x: Tensor | None = None
) -> Quantized:
    """Return the results of one matrix from the operator's outputs. x: the quantized matrix, for statistics."""
    row, column, statistics = request.row, request.column, x is not None
    first = second = first_sums = second_sums = None
    if row is not None:
        first, outputs = take(outputs, row, request.row_exact, inputs.row_amax)
        if statistics:
            first_sums, outputs = _statistics(outputs, row, first, x, x)
    if column is not None:
        second, outputs = take(outputs, column, request.column_exact, inputs.column_amax)
        if statistics:
            second_sums, _ = _statistics(outputs, column, second, x, None if request.dequantized else x.t())
    return Quantized(first, second, first_sums, second_sums)


def _statistics(
    outputs: list[Tensor], spec: KernelSpec, result: Result, x: Tensor, source: Tensor | None
) -> tuple[Statistics, list[Tensor]]:
    """Return one direction's statistics, and the remaining outputs."""
    buffers = None if isinstance(result, ExactOperand) else result
    fields = {"elements": x.numel(), "x": source, "format": spec.format, "buffers": buffers}
    return Statistics(sums=outputs[0], row_errors=outputs[1], **fields), outputs[2:]


def _one_by_one(request: Request, x: Tensor, row: Target, column: Target, statistics: bool) -> Quantized:
    """Quantize each direction by itself: a direction without a kernel does not keep the other from using one."""
    shape = tuple(x.shape)
    first = quantize(x, row._replace(output="codes") if request.dequantized else row, statistics=statistics)
    result = first.rowwise
    if request.dequantized:
        x = dequantize(result, row.format, shape, x.dtype)
        result = exact_operand_of(result, row.format, shape) if request.row_exact else result
    if not statistics:
        return Quantized(result, quantize(x, NO_TARGET, column).columnwise)
    second = quantize(x.t(), column, statistics=True)
    column_sums = second.rowwise_statistics
    if column_sums and request.dequantized:
        column_sums = replace(column_sums, x=None)
    return Quantized(result, second.rowwise, first.rowwise_statistics, column_sums)


def _members(
    request: Request,
    x: Tensor,
    splits: Splits,
    row: Target,
    column: Target,
    statistics: bool,
    backend: Backend,
) -> Quantized:
    """Run quantize() with splits."""
    if splits.rows != x.shape[0] or not splits.count:
        got = f"splits of {splits.rows} rows over {splits.count} experts"
        raise UserError(f"quantize: {got} for a matrix of shape {tuple(x.shape)}")
    if statistics:
        raise UserError("quantize: statistics are those of one matrix; with splits, ask for them member by member")
    check_backend(backend)
    if request.holds:
        return _with_identity(request, x, splits, row, column, backend)
    if backend != "reference" and kernel_takes(request, x, splits):
        inputs = member_inputs(request, row, column, x.device)
        if inputs is not None:
            return _members_by_kernel(request, x, splits, inputs, column.by_rows)
    members = []
    for member, (start, end) in enumerate(splits.spans):
        own = (of_member(target, member) for target in (row, column))
        source = "rowwise_dequantized" if request.dequantized else "original"
        try:
            members.append(quantize(x[start:end], *own, columnwise_source=source, backend=backend))
        except UserError as error:
            raise UserError(f"expert {member}: {error}") from None
    layouts = [GroupLayout.of(splits, x.shape[1], columnwise=columnwise) for columnwise in (False, True)]
    return Quantized(
        pack([member.rowwise for member in members], row.format, layouts[0]),
        pack([member.columnwise for member in members], column.format, layouts[1], by_rows=column.by_rows),
    )


def _members_by_kernel(request: Request, x: Tensor, splits: Splits, inputs: Inputs, by_rows: bool) -> Quantized:
    outputs = operators.quantize(
        x, request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact,
        inputs.row_key, inputs.column_key, inputs.row_amax, inputs.column_amax, False,
        splits.offsets(x.device), splits.sizes, inputs.row_keys, inputs.column_keys, by_rows, inputs.step,
        current(),
    )  # fmt: skip
    first = second = None
    if request.row is not None:
        layout = GroupLayout.of(splits, x.shape[1], columnwise=False)
        first, outputs = take(outputs, request.row, request.row_exact, inputs.row_amax, layout)
    if request.column is not None:
        layout = GroupLayout.of(splits, x.shape[1], columnwise=True)
        second, _ = take(outputs, request.column, request.column_exact, inputs.column_amax, layout, by_rows)
    return Quantized(first, second)


def _with_identity(
    request: Request, x: Tensor, splits: Splits, row: Target, column: Target, backend: Backend
) -> Quantized:
    """Quantize each direction by itself. An identity keeps the matrix whatever the splits; the other may use a
    kernel."""
    source = x.to(row.format.dtype).to(x.dtype) if request.dequantized else x
    results = []
    for columnwise, target, matrix in ((False, row, x), (True, column, source)):
        if target.format is None:
            results.append(None)
        elif not target.format.high_precision:
            targets = (NO_TARGET, target) if columnwise else (target, NO_TARGET)
            results.append(quantize(matrix, *targets, splits=splits, backend=backend)[columnwise])
        else:
            layout = GroupLayout.of(splits, x.shape[1], columnwise=columnwise)
            held = matrix.to(target.format.dtype).reshape(-1)
            results.append(held_exact(held, target.format, layout) if target.output == "exact" else {"q": held})
    return Quantized(*results)


class Pair(NamedTuple):
    """The wanted results of both directions of a tensor."""

    rowwise: str
    """The format's text."""
    columnwise: str
    source: Source
    row_output: Output | None
    column_output: Output | None
    by_rows: bool = False
    decoded: bool = False
    """Whether the exact operand of the rowwise codes is wanted too, if the same pass can write it."""


class _Plan(NamedTuple):
    """A kernel call without its tensors."""

    row: Outputs | None
    column: Outputs | None
    dequantized: bool
    dtype: int


@memo
def _plan(
    pair: Pair,
    dtype: torch.dtype,
    size: tuple[int, int, int | None, tuple[int, ...] | None],
    device_type: str,
) -> _Plan | None:
    """Return the plan for matrices of a size (the fields of Matrices). None: fall back to quantize()."""
    row_text, column_text, source, row_output, column_output, by_rows, decoded = pair
    rows, cols, members, sizes = size
    by_rows = by_rows and members is not None
    dequantized = column_output is not None and source == "rowwise_dequantized"
    row_text, column_text = row_text if row_output or dequantized else "", column_text if column_output else ""
    source = source if column_output else "original"
    request = request_of(row_text, column_text, source, row_output or "codes", column_output or "codes")
    down, across = request.multiples
    blocks_fit = cols % across == 0 and all(own % down == 0 for own in ((rows,) if members is None else sizes or ()))
    takes_x_alone = not (request.stochastic or request.delayed or request.holds)
    has_one_call = request.kernels and dtype in DTYPES and has_kernels(device_type)
    if not (row_text or column_text) or members == 0 or not (blocks_fit and takes_x_alone and has_one_call):
        return None
    decoded = decoded and row_output == "codes" and members is None and request.row.amax_name is None
    row, column = outputs_of(
        size,
        (row_text, False, row_output == "exact", False, False, False, decoded) if row_text else None,
        (column_text, True, column_output == "exact", False, False, by_rows) if column_text else None,
        device_type == "cuda",
    )
    return _Plan(row, column, dequantized, DTYPES[dtype])


def quantize_plain(
    x: Tensor, splits: Splits | None, pair: Pair
) -> tuple[Result | None, Result | None, ExactOperand | None] | None:
    """Return both results of x [rows, cols], or of its members, packed; and the exact operand of the rowwise codes, if
    made.

    None: fall back to quantize().
    """
    if not direct(x) or x.dim() != 2:
        return None
    on_gpu, (rows, cols) = x.is_cuda, x.shape
    if (splits is not None and splits.rows != rows) or (on_gpu and x.get_device() != torch.cuda.current_device()):
        return None
    size = (rows, cols, None, None) if splits is None else (rows, cols, splits.count, splits.sizes)
    plan = _plan(pair, x.dtype, size, "cuda" if on_gpu else "cpu")
    if plan is None:
        return None
    row, column, of_row, of_column, scratch, slot = None, None, [], [], [], now.slot
    if plan.row is not None:
        row = direction(plan.row, x, of_row, scratch, NO_STREAM, None, slot)
    if plan.column is not None:
        column = direction(plan.column, x, of_column, scratch, NO_STREAM, None, slot)
    call = (x.data_ptr(), plan.dtype, rows, cols, *x.stride(), row, column, plan.dequantized, *where(x))
    run = extension().quantize_cuda if on_gpu else extension().quantize_cpu
    if splits is None:
        run(*call)
    else:
        run(*call, splits.offsets(x.device).data_ptr(), splits.count)
    return (
        _result(plan.row, of_row, pair.row_output, cols, splits, False),
        _result(plan.column, of_column, pair.column_output, cols, splits, True),
        ExactOperand(of_row[-1], None, plan.row.spec.divisor) if plan.row is not None and plan.row.together else None,
    )


def _result(
    outputs: Outputs | None,
    tensors: list[Tensor],
    output: Output | None,
    cols: int,
    splits: Splits | None,
    columnwise: bool,
) -> Result | None:
    if output is None:
        return None
    layout = None if splits is None else GroupLayout.of(splits, cols, columnwise=columnwise)
    return take(tensors, outputs.spec, output == "exact", None, layout, outputs.by_rows)[0]
