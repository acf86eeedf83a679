"""Find global amaxes without quantizing. Delayed scaling remembers them, and ranks agree on them."""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey, RngKeys
from hqsweep.ops.library import check_keys, check_offsets, extension, key_table, operator, step_address, where
from hqsweep.ops.quantize.kernels import NO_KEY, KernelSpec, kernel_of, matrix_dtype
from hqsweep.ops.quantize.nonfinite import address_of, current, look_at_trace
from hqsweep.ops.quantize.operators import NO_STREAM, Matrices, amax_count, check_amax, finder, stream_of
from hqsweep.ops.quantize.request import (
    Backend,
    Request,
    Source,
    as_matrix,
    check_shape,
    kernel_takes,
    key_words,
    request_of,
    text_of,
    use_kernel,
)
from hqsweep.ops.splits import Splits


class Search(NamedTuple):
    """One direction of find_amax(): a format, and the tensors that finding its global amax takes.

    With splits, tensors are flat and packed: one entry per member, or per operand row of each member for +row_scaled.
    """

    format: Format | None
    out: Tensor | None = None
    """The tensor that receives the amax. None: no amax is wanted."""
    amax: Tensor | None = None
    """The known amax of the rows, needed if columns are made from decoded rows."""
    key: object = None
    """The RngKey with which rows are decoded, or that draws the signs of a transform; with splits, one per member."""


NO_SEARCH = Search(None)


def find_amax(
    x: Tensor,
    rowwise: Search,
    columnwise: Search = NO_SEARCH,
    *,
    columnwise_source: Source = "original",
    splits: Splits | None = None,
    backend: Backend = "auto",
) -> None:
    """Set out = max(out, global amax) in place: float32 [1, 1], or [operand rows, 1] for +row_scaled. NaN is ignored.

    Only directions with an `out` are scanned. With rowwise_dequantized, the columnwise amax belongs to the decoded
    rowwise operand. The rowwise amax is then given, or found in rowwise.out (fp8_delayed: must be given).

    splits: find each member's own amax, with the bytes that a call on its rows alone gives. A kernel serves all members
    in one call and does not wait for splits on the device. Without a kernel, each member takes a call, which waits.

    Raises:
        UserError: for splits or outputs that do not fit x, a format without global amax, or a missing rowwise amax.
    """
    x = as_matrix(x)
    if splits is not None:
        if splits.rows != len(x):
            raise UserError(f"find_amax: splits of {splits.rows} rows for a matrix of shape {tuple(x.shape)}")
        if columnwise_source == "rowwise_dequantized" and rowwise.format and rowwise.format.high_precision:
            x, rowwise, columnwise_source = x.to(rowwise.format.dtype).to(x.dtype), NO_SEARCH, "original"
    decodes = columnwise_source == "rowwise_dequantized"
    request = request_of(
        text_of(rowwise.format) if rowwise.out is not None or decodes else "",
        text_of(columnwise.format) if columnwise.out is not None else "",
        columnwise_source, "codes", "codes",
    )  # fmt: skip
    if splits is None:
        check_shape(request, x.shape)
    _check(request, x, rowwise, columnwise, splits)
    if splits is None:
        _one(request, x, rowwise, columnwise, backend)
    elif rowwise.out is not None or columnwise.out is not None:
        _members(request, x, splits, rowwise, columnwise, backend)


def _check(request: Request, x: Tensor, rowwise: Search, columnwise: Search, splits: Splits | None) -> None:
    """Raise UserError if a format has no amax to find, or if rows must be decoded and their amax is unknown."""
    matrices = Matrices(*x.shape, None if splits is None else splits.count)
    for name, spec, out, is_column in (
        ("rowwise", request.row, rowwise.out, False),
        ("columnwise", request.column, columnwise.out, True),
    ):
        if out is not None and (spec is None or spec.amax_name is None):
            raise UserError(
                f"find_amax: {spec.text if spec else 'no format'} has no global amax to find for {name} out"
            )
        if spec:
            check_amax(spec, f"{name} out", out, amax_count(spec, matrices, is_column), x)
    row = request.row
    if row:
        check_amax(row, "rowwise amax", rowwise.amax, amax_count(row, matrices, False), x)
    if request.dequantized and row.amax_name and rowwise.amax is None and (rowwise.out is None or row.delayed):
        where = "rowwise amax" if row.delayed else "rowwise amax or out"
        raise UserError(f"find_amax: decoding {row.text} rows needs their amax: give {where}")


def _one(request: Request, x: Tensor, rowwise: Search, columnwise: Search, backend: Backend) -> None:
    outs = (rowwise.out, columnwise.out)
    if not use_kernel(request, x, backend):
        _by_reference(request, x, (rowwise.key, columnwise.key), rowwise.amax, outs)
    elif rowwise.out is not None or columnwise.out is not None:
        reads = _reads_keys(request)
        keys = [
            key_words(spec, search.key) if read else NO_KEY
            for spec, search, read in zip((request.row, request.column), (rowwise, columnwise), reads, strict=True)
        ]
        counters = [key.counter for key, read in zip((rowwise.key, columnwise.key), reads, strict=True) if read]
        texts, rest = (request.row_text, request.column_text), (counters[0] if counters else None, current())
        find_amax_(x, *texts, request.dequantized, keys[0], rowwise.amax, *outs, None, None, *rest, keys[1])


def _reads_keys(request: Request) -> tuple[bool, bool]:
    """Return whether finding amaxes draws random bits under the key of rows, and under the key of columns."""
    row, column = (spec is not None and spec.format.rht_drawn for spec in (request.row, request.column))
    return row or (request.dequantized and request.row.stochastic), column


def _members(
    request: Request, x: Tensor, splits: Splits, rowwise: Search, columnwise: Search, backend: Backend
) -> None:
    keys, (random, drawn) = rowwise.key, _reads_keys(request)
    known = not random or (keys is not None and (isinstance(keys, RngKeys) or None not in keys))
    known &= not drawn or isinstance(columnwise.key, RngKeys)  # which share a seed, and so the signs
    if known and use_kernel(request, x, backend) and kernel_takes(request, x, splits):
        table, key, step, column_key = None, NO_KEY, None, None
        if drawn:
            own = columnwise.key
            column_key, step = [own.words[0], 0, own.step], own.counter
        if random:
            table, key, step = key_table(keys, x.device), [0, 0, keys[0].step], keys[0].counter
        texts, amaxes = (request.row_text, request.column_text), (rowwise.amax, rowwise.out, columnwise.out)
        offsets = splits.offsets(x.device)
        find_amax_(x, *texts, request.dequantized, key, *amaxes, offsets, table, step, current(), column_key)
        return
    source = "rowwise_dequantized" if request.dequantized else "original"
    for member, span in enumerate(splits.spans):
        if span[1] > span[0]:
            lines = (member * x.shape[1], (member + 1) * x.shape[1])
            row, column = (
                search._replace(
                    format=spec and spec.format,
                    out=_own(search.out, spec, own, member),
                    amax=_own(search.amax, spec, own, member),
                    key=search.key[member] if search.key else None,
                )
                for search, spec, own in ((rowwise, request.row, span), (columnwise, request.column, lines))
            )
            find_amax(x[slice(*span)], row, column, columnwise_source=source, backend=backend)


def _own(amaxes: Tensor | None, spec: KernelSpec, lines: tuple[int, int], member: int) -> Tensor | None:
    """Return one member's amaxes. lines: the member's rows among the operand rows of all members."""
    if amaxes is None:
        return None
    return amaxes[slice(*lines)] if spec.row_scaled else amaxes[member : member + 1]


def _by_reference(
    request: Request,
    x: Tensor,
    keys: tuple[RngKey | None, RngKey | None],
    amax: Tensor | None,
    outs: tuple[Tensor | None, Tensor | None],
) -> None:
    """Run find_amax() for one matrix. amax: of its rows."""
    for i, (spec, out) in enumerate(zip((request.row, request.column), outs, strict=True)):
        if spec is None:
            continue
        format, source = spec.format, x.t() if i else x
        if out is not None:
            out.copy_(torch.maximum(out, format.grid(source, keys[i])[spec.amax_name].view_as(out)))
        if i == 0 and request.dequantized:
            known = amax if amax is not None else out
            grid = format.grid(x, keys[0]) | ({spec.amax_name: known.view(-1, 1)} if known is not None else {})
            x = format.decode(format.encode(x, grid, keys[0]), tuple(x.shape)).to(x.dtype)


@operator(
    "find_amax_(Tensor x, str rowwise, str columnwise, bool dequantized, SymInt[] rowwise_key, Tensor? rowwise_amax, "
    "Tensor(a!)? rowwise_found, Tensor(b!)? columnwise_found, Tensor? offsets=None, Tensor? rowwise_keys=None, "
    "Tensor? step=None, int seen=0, SymInt[]? columnwise_key=None) -> ()",
    fake=lambda *_, **__: None,
)
def find_amax_(x, rowwise, columnwise, dequantized, row_key, row_amax, row_found, column_found, offsets=None,
              row_keys=None, step=None, seen=0, column_key=None):  # fmt: skip
    """Set found = max(found, global amaxes) in place, for the rows and for the columns of X."""
    dtype, row, column, members = matrix_dtype(x), None, None, None
    rows, cols = x.shape
    if offsets is not None:
        members = check_offsets(x, offsets)
        check_keys(x, row_keys, members)
    elif row_keys is not None:
        raise ValueError("a table of keys is that of members, which need offsets")
    matrices = Matrices(rows, cols, members)
    if rowwise:
        spec = kernel_of(rowwise)
        stream = stream_of(row_key, row_keys, step_address(x, step))
        noted = address_of(x, seen, False, spec.format) if spec.delayed else 0
        row = finder(spec, amax_count(spec, matrices, False), x, stream, row_amax, row_found, noted)
    if columnwise:
        spec = kernel_of(columnwise)
        noted = address_of(x, seen, True, spec.format) if spec.delayed else 0
        stream = stream_of(column_key, None, step_address(x, step)) if column_key else NO_STREAM
        column = finder(spec, amax_count(spec, matrices, True), x, stream, None, column_found, noted)
    call = (x.data_ptr(), dtype, rows, cols, *x.stride(), row, column, dequantized)
    run = extension().find_amax_cuda if x.is_cuda else extension().find_amax_cpu
    run(*call, *where(x), *(() if offsets is None else (offsets.data_ptr(), members)))
    look_at_trace(seen, x)
