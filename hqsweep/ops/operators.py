"""The compiled extension as torch operators: hqsweep::quantize, find_amax_, dequantize, scale_product.

Each operator is one function here: its schema, its result in traced graphs, what it runs, and how it is called. Bytes
equal the reference's; tests and the parity job hold that. Formats travel as their canonical text, "" where a direction
is not wanted. Work is enqueued on the current stream and nothing waits for it. Autograd is left to the modules.

offsets: None for one matrix. Otherwise int64 [members + 1], the first rows of the matrices (members) that own the rows
of X, and the end of the last; each is quantized by itself, in one call. The offsets stay where they are: on CUDA
nothing waits for them, and a graph serves any splits of as many rows. Outputs are packed then (ops.packed): exact sizes
where the host gives `sizes`, room for any where it does not; what stands behind the last member is left open. Offsets
begin with 0, do not decrease and end within X. The CPU refuses others; on a GPU, which nobody waits for, they are the
caller's promise: with others, outputs may be written past their ends.
"""

import math

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.ops.addresses import check_keys, check_offsets, described, empty
from hqsweep.ops.kernels import DTYPES, NO_KEY, spec_named
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.outputs import Matrices, Wanted, allocations, amax_count, direction, finder, outputs_of


def _quantize_fake(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax,
                   column_amax, statistics, offsets=None, sizes=None, row_keys=None, column_keys=None,
                   by_rows=False):  # fmt: skip
    matrices = Matrices(*x.shape, None if offsets is None else offsets.numel() - 1, sizes)
    shapes, on_gpu = [], x.device.type == "cuda"
    if rowwise:
        wanted = Wanted(rowwise, False, row_exact, row_amax is not None, statistics)
        shapes += allocations(matrices, wanted, on_gpu)
    if columnwise:
        wanted = Wanted(columnwise, True, column_exact, column_amax is not None, statistics)
        shapes += allocations(matrices, wanted, on_gpu)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


@operator(
    "quantize(Tensor x, str rowwise, str columnwise, bool dequantized, bool rowwise_exact, bool columnwise_exact, "
    "SymInt[] rowwise_key, SymInt[] columnwise_key, Tensor? rowwise_amax, Tensor? columnwise_amax, bool statistics, "
    "Tensor? offsets=None, SymInt[]? sizes=None, Tensor? rowwise_keys=None, Tensor? columnwise_keys=None, "
    "bool by_rows=False) -> Tensor[]",
    fake=_quantize_fake,
)
def quantize(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax, column_amax,
             statistics, offsets=None, sizes=None, row_keys=None, column_keys=None, by_rows=False):  # fmt: skip
    """X -> the outputs of its rows, then of its columns (ops.outputs.allocations)."""
    (rows, cols), on_gpu = x.shape, x.is_cuda
    members = None if offsets is None else check_offsets(x, offsets)
    row_outputs, column_outputs = outputs_of(
        (rows, cols, members, None if sizes is None else tuple(sizes)),
        (rowwise, False, row_exact, row_amax is not None, statistics) if rowwise else None,
        (columnwise, True, column_exact, column_amax is not None, statistics, by_rows) if columnwise else None,
        on_gpu,
    )
    tensors, scratch, row, column = [], [], None, None
    if rowwise:
        row = direction(row_outputs, x, tensors, scratch, row_key, row_amax, row_keys)
    if columnwise:
        column = direction(column_outputs, x, tensors, scratch, column_key, column_amax, column_keys)
    call = (x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized)
    run = extension().quantize_cuda if on_gpu else extension().quantize_cpu
    if offsets is None:
        run(*call, *where(x))
        return tensors
    check_keys(x, row_keys, members)
    check_keys(x, column_keys, members)
    run(*call, *where(x), offsets.data_ptr(), members)
    return tensors


@operator(
    "find_amax_(Tensor x, str rowwise, str columnwise, bool dequantized, SymInt[] rowwise_key, Tensor? rowwise_amax, "
    "Tensor(a!)? rowwise_found, Tensor(b!)? columnwise_found, Tensor? offsets=None, Tensor? rowwise_keys=None) -> ()",
    fake=lambda *_, **__: None,
)
def find_amax(x, rowwise, columnwise, dequantized, row_key, row_amax, row_found, column_found, offsets=None,
              row_keys=None):  # fmt: skip
    """found = max(found, global amaxes) in place, of the rows of X and of its columns."""
    (rows, cols), row, column, members = x.shape, None, None, None
    if offsets is not None:
        members = check_offsets(x, offsets)
        check_keys(x, row_keys, members)
    matrices = Matrices(rows, cols, members)
    if rowwise:
        spec = spec_named(rowwise)
        row = finder(spec, amax_count(spec, matrices, False), x, row_key, row_amax, row_found, row_keys)
    if columnwise:
        spec = spec_named(columnwise)
        column = finder(spec, amax_count(spec, matrices, True), x, NO_KEY, None, column_found, None)
    call = (x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized)
    run = extension().find_amax_cuda if x.is_cuda else extension().find_amax_cpu
    run(*call, *where(x), *(() if offsets is None else (offsets.data_ptr(), members)))


def _dequantize_fake(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    return buffers[0].new_empty((rows, cols) if offsets is None else (rows * cols,), dtype=dtype)


@operator(
    "dequantize(Tensor[] buffers, str format, SymInt rows, SymInt cols, bool exact, ScalarType dtype, "
    "Tensor? offsets=None, bool columnwise=False) -> Tensor",
    fake=_dequantize_fake,
)
def dequantize(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    """Buffers in layout order -> values in dtype, or exact: codes times block scales.

    One operand [rows, cols] gives its matrix. Packed buffers of the members of X [rows, cols] give flat [rows * cols],
    by rows of X, also where they are columnwise; bytes are those of each member by itself.
    ValueError for offsets and packed buffers of other types, and for too few entries.
    """
    first, spec = buffers[0], spec_named(format)
    addresses = [tensor.data_ptr() for tensor in buffers] + [0] * (3 - len(buffers))
    run = extension().dequantize_cuda if first.is_cuda else extension().dequantize_cpu
    threads = where(first)[0]
    if offsets is None:
        out = empty(first, (rows, cols), (cols or 1, 1), dtype)
        run(spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), DTYPES[dtype], threads)
        return out
    members = check_offsets(first, offsets)
    least = _least_entries(format, rows, cols, columnwise)
    for (name, _, _, wanted), tensor, count in zip(spec.buffers, buffers, least, strict=True):
        if tensor.dtype != wanted or tensor.numel() < count or not tensor.is_contiguous():
            raise ValueError(f"buffer {name} is {described(tensor)}; it takes {count} or more contiguous {wanted}")
    out = empty(first, (rows * cols,), (1,), dtype)
    call = (spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), DTYPES[dtype], threads)
    run(*call, columnwise, offsets.data_ptr(), members)
    return out


@memo
def _least_entries(text: str, rows: int, cols: int, columnwise: bool) -> list[int]:
    """The fewest entries that each packed buffer can have for X [rows, cols]: those of one member with all rows, codes
    alone where there may be none."""
    spec = spec_named(text)
    shapes = spec.format.shapes(*((cols, rows) if columnwise else (rows, cols)))
    return [math.prod(shapes[name]) if rows and cols else 0 for name in spec.names]


@operator(
    "scale_product(Tensor product, Tensor factor, ScalarType dtype, float before=1.0) -> Tensor",
    fake=lambda product, factor, dtype, before=1.0: torch.empty_like(product, dtype=dtype),
    devices=("CUDA",),
)
def scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype, before: float = 1.0) -> Tensor:
    """fl(fl(product * before) * factor) in float32, rounded to dtype; product float32 or bfloat16 [m, n], contiguous,
    factor float32 [1, 1], [m, 1] or [1, n]."""
    out = torch.empty_like(product, dtype=dtype)
    steps = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    call = (product.data_ptr(), DTYPES[product.dtype], before, factor.data_ptr(), *product.shape, *steps)
    extension().scale_product_cuda(*call, out.data_ptr(), DTYPES[dtype], *where(product))
    return out
