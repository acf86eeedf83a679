"""quantize() by one kernel call, for tensors that need no keys and no amaxes.

Most calls of a training are of this kind. Everything that depends on the size alone is computed once, so that the host
only allocates and launches. ops.quantize.quantize handles all other calls, and gives the same bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand
from hqsweep.memo import memo
from hqsweep.ops.library import direct, extension, has_kernels, where
from hqsweep.ops.members.layout import GroupLayout
from hqsweep.ops.members.packed import Result, take
from hqsweep.ops.members.splits import Splits
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.ops.quantize.nonfinite import now
from hqsweep.ops.quantize.outputs import NO_STREAM, Outputs, direction, outputs_of
from hqsweep.ops.quantize.request import Output, Source, request_of


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
