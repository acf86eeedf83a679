"""The compiled extension as torch operators: hqsweep::quantize, find_amax_, dequantize, scale_product.

Each operator is one function: its schema, its outputs in traced graphs, and the kernel that it calls. Bytes equal the
reference's, which tests and the parity job check. Formats are passed as canonical text, "" for an unwanted direction.
Work is enqueued on the current stream, and nothing waits for it. Modules provide the gradients.

offsets: None for one matrix. Otherwise int64 [members + 1]: the first row of each matrix (member) among the rows of X,
and the end of the last one. Each member is quantized by itself, in one call. On CUDA nothing waits for offsets, and a
graph serves any splits of as many rows. Outputs are packed (ops.members.packed): with exact sizes if the host gives
`sizes`, else with room for any sizes. Entries after the last member are undefined. Offsets begin with 0, do not
decrease, end within X and agree with `sizes`. The CPU checks this. On a GPU the caller guarantees it: wrong offsets can
make kernels write out of bounds.

step: int64 [1] on X's device. When the kernel runs, all keys of the call take their step from it. None: keys have
steps.

Everything else that kernels access by address is checked here: dtypes, devices, shapes, gaps, numbers of entries, keys.
ValueError names the fault. Direct callers of hqsweep._C must check by themselves.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.ops.addresses import check_keys, check_offsets, check_sizes, described, empty, integers, step_address
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.quantize.kernels import DTYPES, KernelSpec, kernel_of
from hqsweep.ops.quantize.nonfinite import address_of, look_at_trace
from hqsweep.ops.quantize.outputs import (
    NO_STREAM,
    Matrices,
    Wanted,
    allocations,
    amax_count,
    direction,
    finder,
    outputs_of,
    packed_entries,
    stream_of,
)


def _dtype_of(x: Tensor) -> int:
    """Return the extension's number for X's dtype. ValueError unless X is a matrix that the kernels can read."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or x.dim() != 2:
        raise ValueError(f"x is {described(x)}; it takes float32, bfloat16 or float16 with two axes")
    return dtype


def _quantize_fake(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax,
                   column_amax, statistics, offsets=None, sizes=None, row_keys=None, column_keys=None,
                   by_rows=False, step=None, seen=0):  # fmt: skip
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
    "bool by_rows=False, Tensor? step=None, int seen=0) -> Tensor[]",
    fake=_quantize_fake,
)
def quantize(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax, column_amax,
             statistics, offsets=None, sizes=None, row_keys=None, column_keys=None, by_rows=False,
             step=None, seen=0):  # fmt: skip
    """Return the outputs for the rows of X, then for its columns (ops.quantize.outputs.allocations).

    seen: the slot number for which kernels record NaN and inf (ops.quantize.nonfinite).
    """
    dtype, on_gpu = _dtype_of(x), x.is_cuda
    rows, cols = x.shape
    if offsets is not None:
        members = check_offsets(x, offsets)
    elif row_keys is None and column_keys is None:
        members = None
    else:
        raise ValueError("tables of keys are those of members, which need offsets")
    row_outputs, column_outputs = outputs_of(
        (rows, cols, members, None if sizes is None else tuple(sizes)),
        (rowwise, False, row_exact, row_amax is not None, statistics) if rowwise else None,
        (columnwise, True, column_exact, column_amax is not None, statistics, by_rows) if columnwise else None,
        on_gpu,
    )
    tensors, scratch, row, column, step_at = [], [], None, None, step_address(x, step)
    if rowwise:
        row = direction(row_outputs, x, tensors, scratch, stream_of(row_key, row_keys, step_at), row_amax, seen)
    if columnwise:
        stream = stream_of(column_key, column_keys, step_at)
        column = direction(column_outputs, x, tensors, scratch, stream, column_amax, seen)
    call = (x.data_ptr(), dtype, rows, cols, *x.stride(), row, column, dequantized)
    run = extension().quantize_cuda if on_gpu else extension().quantize_cpu
    if offsets is None:
        run(*call, *where(x))
    else:
        check_keys(x, row_keys, members)
        check_keys(x, column_keys, members)
        if sizes is not None and not on_gpu:
            check_sizes(offsets, sizes)
        run(*call, *where(x), offsets.data_ptr(), members)
    look_at_trace(seen, x)
    return tensors


@operator(
    "find_amax_(Tensor x, str rowwise, str columnwise, bool dequantized, SymInt[] rowwise_key, Tensor? rowwise_amax, "
    "Tensor(a!)? rowwise_found, Tensor(b!)? columnwise_found, Tensor? offsets=None, Tensor? rowwise_keys=None, "
    "Tensor? step=None, int seen=0) -> ()",
    fake=lambda *_, **__: None,
)
def find_amax(x, rowwise, columnwise, dequantized, row_key, row_amax, row_found, column_found, offsets=None,
              row_keys=None, step=None, seen=0):  # fmt: skip
    """Set found = max(found, global amaxes) in place, for the rows and for the columns of X."""
    dtype, row, column, members = _dtype_of(x), None, None, None
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
        column = finder(spec, amax_count(spec, matrices, True), x, NO_STREAM, None, column_found, noted)
    call = (x.data_ptr(), dtype, rows, cols, *x.stride(), row, column, dequantized)
    run = extension().find_amax_cuda if x.is_cuda else extension().find_amax_cpu
    run(*call, *where(x), *(() if offsets is None else (offsets.data_ptr(), members)))
    look_at_trace(seen, x)


def _dequantize_fake(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    return buffers[0].new_empty((rows, cols) if offsets is None else (rows * cols,), dtype=dtype)


@operator(
    "dequantize(Tensor[] buffers, str format, SymInt rows, SymInt cols, bool exact, ScalarType dtype, "
    "Tensor? offsets=None, bool columnwise=False) -> Tensor",
    fake=_dequantize_fake,
)
def dequantize(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    """Return the values of buffers, in layout order, in dtype. exact: codes times block scales.

    One operand [rows, cols] gives a matrix. Packed buffers of the members of X [rows, cols] give flat [rows * cols],
    stored by rows of X even if columnwise. The bytes equal a call per member.
    ValueError for offsets or packed buffers with wrong types, and for too few entries.
    """
    if not buffers:  # beside offsets, which have a device
        raise ValueError("there are no buffers to decode")
    first, number = buffers[0], DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"dtype is {dtype}; values are decoded to float32, bfloat16 or float16")
    members = None if offsets is None else check_offsets(first, offsets)
    spec, least = _least_entries(format, rows, cols, columnwise, members)
    _check_buffers(spec, buffers, least)
    addresses = [tensor.data_ptr() for tensor in buffers] + [0] * (3 - len(buffers))
    run = extension().dequantize_cuda if first.is_cuda else extension().dequantize_cpu
    threads = where(first)[0]
    if offsets is None:
        out = empty(first, (rows, cols), (cols or 1, 1), dtype)
        run(spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), number, threads, columnwise)
        return out
    if not first.is_cuda:
        _check_buffers(spec, buffers, _entries(spec, rows, cols, columnwise, offsets))
    out = empty(first, (rows * cols,), (1,), dtype)
    call = (spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), number, threads)
    run(*call, columnwise, offsets.data_ptr(), members)
    return out


def decode_into(out: Tensor, buffers: list[Tensor], format: str) -> None:
    """Decode one operand exactly, on CUDA, into out [rows, cols], whose rows may lie apart.

    ValueError for an unfit out, and as dequantize() raises it.
    """
    (rows, cols), first = out.shape, buffers[0]
    spec, least = _least_entries(format, rows, cols, False, None)
    _check_buffers(spec, buffers, least)
    if out.dtype not in DTYPES or out.stride(1) != 1 or out.stride(0) < cols or out.device != first.device:
        raise ValueError(f"out is {described(out)}; it takes rows of floats without gaps on {first.device}")
    addresses = [tensor.data_ptr() for tensor in buffers] + [0] * (3 - len(buffers))
    call = (spec.compiled, rows, cols, *addresses, True, out.data_ptr(), DTYPES[out.dtype], *where(first))
    extension().dequantize_cuda(*call, pitch=out.stride(0))


def _check_buffers(spec: KernelSpec, buffers: list[Tensor], least: list[int]) -> None:
    """Raise ValueError for buffers that the kernels cannot read, or with fewer entries than `least`."""
    if len(buffers) != len(least):
        raise ValueError(f"{len(buffers)} buffers for {spec.text}; it has {len(least)}: {', '.join(spec.names)}")
    device = buffers[0].get_device()
    for (name, _, _, wanted), tensor, count in zip(spec.buffers, buffers, least, strict=True):
        readable = tensor.dtype is wanted and tensor.is_contiguous() and tensor.get_device() == device
        if not readable or tensor.numel() < count:
            takes = f"it takes {count} or more contiguous {wanted} on {buffers[0].device}"
            raise ValueError(f"buffer {name} is {described(tensor)}; {takes}")


@memo
def _least_entries(
    text: str, rows: int, cols: int, columnwise: bool, members: int | None
) -> tuple[KernelSpec, list[int]]:
    """Return the KernelSpec, and the fewest entries that each buffer needs for X [rows, cols].

    With members, the minimum is that of one member with all rows. ValueError for a negative size.
    """
    spec = kernel_of(text)
    if rows < 0 or cols < 0:
        raise ValueError(f"an operand cannot have the shape {(rows, cols)}")
    if members is None:
        shapes = spec.format.shapes(rows, cols)
        return spec, [math.prod(shapes[name]) for name in spec.names]
    if rows == 0 or cols == 0:
        return spec, [0] * len(spec.names)
    alone = Matrices(rows, cols, members, (rows, *(0,) * (members - 1)) if members else ())
    return spec, [packed_entries(alone, columnwise, down, across) for _, down, across, _ in spec.buffers]


def _entries(spec: KernelSpec, rows: int, cols: int, columnwise: bool, offsets: Tensor) -> list[int]:
    """Return the entries of each packed buffer up to the end of the last member. offsets: on the CPU.

    Wrong offsets are clamped, so that the result never exceeds the rows of X.
    """
    ends = [min(end, rows) for end in integers(offsets)]
    matrices = Matrices(rows, cols, len(ends) - 1, tuple(max(end - start, 0) for start, end in pairwise(ends)))
    return [packed_entries(matrices, columnwise, down, across) for _, down, across, _ in spec.buffers]


@operator(
    "scale_product(Tensor product, Tensor factor, ScalarType dtype, float before=1.0) -> Tensor",
    fake=lambda product, factor, dtype, before=1.0: torch.empty_like(product, dtype=dtype),
    devices=("CUDA",),
)
def scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype, before: float = 1.0) -> Tensor:
    """Return fl(fl(product * before) * factor) in float32, rounded to dtype.

    product: float32 or bfloat16 [m, n], contiguous. factor: float32 [1, 1], [m, 1] or [1, n].
    """
    if product.dtype not in (torch.float32, torch.bfloat16) or product.dim() != 2 or not product.is_contiguous():
        raise ValueError(f"product is {described(product)}; it takes float32 or bfloat16 with two axes, contiguous")
    rows, cols = product.shape
    fits = factor.dim() == 2 and factor.shape[0] in (1, rows) and factor.shape[1] in (1, cols)
    if not fits or factor.dtype != torch.float32 or factor.device != product.device:
        takes = f"it takes float32 [1, 1], [m, 1] or [1, n] on {product.device}"
        raise ValueError(f"factor is {described(factor)} for a product {tuple(product.shape)}; {takes}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; products are rounded to float32, bfloat16 or float16")
    out = torch.empty_like(product, dtype=dtype)
    steps = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    call = (product.data_ptr(), DTYPES[product.dtype], before, factor.data_ptr(), rows, cols, *steps)
    extension().scale_product_cuda(*call, out.data_ptr(), DTYPES[dtype], *where(product))
    return out
