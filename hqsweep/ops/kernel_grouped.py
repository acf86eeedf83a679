"""The extension's grouped functions as torch operators: hqsweep::quantize_grouped, find_amax_grouped_,
dequantize_grouped, split_offsets.

One call quantizes the rows of all experts, whose offsets stay where they are: on CUDA nothing waits for them, and a
graph serves any splits of as many rows. Outputs are packed buffers (ops.grouped_layout), exact where the host knows the
splits and of packed_allocations() where it does not; what stands beyond the last expert's is left open. Offsets begin
with 0, do not decrease and end within X (given sizes, they are those of the sizes). The CPU refuses others; on a GPU,
which nobody waits for, they are the caller's promise: with others, outputs may be written past their ends.

by_rows: the exact values of columnwise members stand where the elements of X [rows, cols] do that they come from, and
not transposed. What dequantize_grouped gives always does.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.formats import RngKey, RngKeys
from hqsweep.ops.kernel import Side, direct, direction, empty, finder, on_its_device, side
from hqsweep.ops.plan import DTYPES, NO_KEY, SHAPES_KEPT, Allocation, Plan, extension, plan

KEPT_KEYS = 1024

_library = Library("hqsweep", "FRAGMENT")
_library.define(
    "quantize_grouped(Tensor x, Tensor offsets, SymInt[]? sizes, str rowwise, str columnwise, bool dequantized, "
    "bool rowwise_exact, bool columnwise_exact, Tensor? rowwise_keys, Tensor? columnwise_keys, int step, "
    "Tensor? rowwise_amax, Tensor? columnwise_amax, bool by_rows=False) -> Tensor[]"
)
_library.define(
    "find_amax_grouped_(Tensor x, Tensor offsets, str rowwise, str columnwise, bool dequantized, Tensor? rowwise_keys, "
    "int step, Tensor? rowwise_amax, Tensor(a!)? rowwise_found, Tensor(b!)? columnwise_found) -> ()"
)
_library.define(
    "dequantize_grouped(Tensor[] buffers, str format, bool columnwise, Tensor offsets, SymInt rows, SymInt cols, "
    "bool exact, ScalarType dtype) -> Tensor"
)
_library.define("split_offsets(Tensor splits, int[] divisors, int[] strides, bool check) -> Tensor")


def packed_allocations(
    p: Plan, rows: int, cols: int, experts: int, sizes: list[int] | None, columns: bool, exact: bool, given: bool,
    on_gpu: bool,
) -> list[Allocation]:  # fmt: skip
    """The operator's outputs for one direction of X [rows, cols], as Plan.allocations has them for one matrix, flat."""

    def entries(down: int, across: int) -> int:
        ragged, other = (across, down) if columns else (down, across)
        if sizes is not None:
            along = sum(-(-size // ragged) if ragged else 1 for size in sizes)
        else:
            along = rows // ragged + experts * (ragged > 1) if ragged else experts
        return along * (-(-cols // other) if other else 1)

    kept = "g" if given and p.amax_name == "g" else None
    if exact:
        made = [(entries(1, 1), p.exact_dtype(on_gpu))]
        if p.amax_name and p.amax_name != kept:
            factor = p.format.layout[p.amax_name]
            made.append((entries(factor.rows, factor.cols), torch.float32))
        return made
    return [(entries(down, across), dtype) for name, down, across, dtype in p.buffers if name != kept]


# Arguments in the order of the schema.
def _quantize_grouped(x, offsets, sizes, rowwise, columnwise, dequantized, row_exact, column_exact, row_keys,
                      column_keys, step, row_amax, column_amax, by_rows=False):  # fmt: skip
    (rows, cols), experts, on_gpu = x.shape, offsets.numel() - 1, x.is_cuda
    _check_offsets(x, offsets, experts)
    made, kept, row, column, key = [], [], None, None, (0, 0, step)
    shape = (rows, cols, experts, None if sizes is None else tuple(sizes))
    if rowwise:
        side = _side(rowwise, *shape, False, row_exact, row_amax is not None, on_gpu)
        _check_keys(x, row_keys, experts)
        row = direction(side, x, rows, made, kept, key, row_amax, experts, row_keys)
    if columnwise:
        side = _side(columnwise, *shape, True, column_exact, column_amax is not None, on_gpu)
        _check_keys(x, column_keys, experts)
        column = direction(side, x, experts * cols, made, kept, key, column_amax, experts, column_keys, by_rows)
    call = (x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized, offsets.data_ptr())
    if on_gpu:
        extension().quantize_grouped_cuda(*call, experts, torch._C._cuda_getCurrentRawStream(x.get_device()))
    else:
        extension().quantize_grouped_cpu(*call, experts, torch.get_num_threads())
    return made


def _find_amax_grouped(x, offsets, rowwise, columnwise, dequantized, row_keys, step, row_amax, row_found, column_found):
    (rows, cols), experts, row, column = x.shape, offsets.numel() - 1, None, None
    _check_offsets(x, offsets, experts)
    _check_keys(x, row_keys, experts)
    if rowwise:
        row = finder(plan(rowwise), x, rows, [0, 0, step], row_amax, row_found, experts, row_keys)
    if columnwise:
        column = finder(plan(columnwise), x, experts * cols, NO_KEY, None, column_found, experts)
    call = (x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized, offsets.data_ptr())
    if x.is_cuda:
        extension().find_amax_grouped_cuda(*call, experts, torch._C._cuda_getCurrentRawStream(x.get_device()))
    else:
        extension().find_amax_grouped_cpu(*call, experts, torch.get_num_threads())


@lru_cache(maxsize=SHAPES_KEPT)
def _side(
    text: str, rows: int, cols: int, experts: int, sizes: tuple[int, ...] | None, columns: bool, exact: bool,
    given: bool, on_gpu: bool,
) -> Side:  # fmt: skip
    """Of a group. Remembered: a training repeats its shapes, if not its splits."""
    if sizes is not None and (len(sizes) != experts or sum(sizes) != rows):
        got = f"{len(sizes)} sizes of {sum(sizes)} rows"
        raise ValueError(f"{got} for {experts} experts and a matrix of shape {(rows, cols)}")
    wanted = packed_allocations(plan(text), rows, cols, experts, sizes, columns, exact, given, on_gpu)
    return side(plan(text), [((count,), dtype) for count, dtype in wanted], exact, given, matrices=experts)


def _check_offsets(x: Tensor, offsets: Tensor, experts: int) -> None:
    if offsets.dtype is not torch.int64 or offsets.device != x.device or experts < 0 or not offsets.is_contiguous():
        raise ValueError(f"offsets are {_told(offsets)}; they take int64 [experts + 1], contiguous, on {x.device}")


def _check_keys(x: Tensor, table: Tensor | None, experts: int) -> None:
    if table is not None and (table.dtype != torch.int32 or table.shape != (experts, 2) or table.device != x.device):
        raise ValueError(f"keys are {_told(table)}; they take int32 [{experts}, 2] on {x.device}")


def _quantize_grouped_fake(x, offsets, sizes, rowwise, columnwise, dequantized, row_exact, column_exact, row_keys,
                           column_keys, step, row_amax, column_amax, by_rows=False):  # fmt: skip
    (rows, cols), experts, made = x.shape, offsets.numel() - 1, []
    shape, on_gpu = (rows, cols, experts, sizes), x.device.type == "cuda"
    if rowwise:
        made += packed_allocations(plan(rowwise), *shape, False, row_exact, row_amax is not None, on_gpu)
    if columnwise:
        made += packed_allocations(plan(columnwise), *shape, True, column_exact, column_amax is not None, on_gpu)
    return [x.new_empty(count, dtype=dtype) for count, dtype in made]


def _dequantize_grouped(buffers, format, columnwise, offsets, rows, cols, exact, dtype):
    first, experts = buffers[0], offsets.numel() - 1
    if offsets.dtype != torch.int64 or offsets.device != first.device or not offsets.is_contiguous() or experts < 0:
        raise ValueError(f"offsets are {_told(offsets)}; they take int64 [experts + 1], contiguous, on {first.device}")
    p, addresses = plan(format), [t.data_ptr() for t in buffers] + [0] * (3 - len(buffers))
    for (name, _, _, wanted), tensor, count in zip(
        p.buffers, buffers, _least(format, rows, cols, columnwise), strict=True
    ):
        if tensor.dtype != wanted or tensor.numel() < count or not tensor.is_contiguous():
            raise ValueError(f"buffer {name} is {_told(tensor)}; it takes {count} or more contiguous {wanted}")
    out = empty(first, (rows * cols,), (1,), dtype)
    call = (
        p.spec,
        rows,
        cols,
        *addresses,
        exact,
        out.data_ptr(),
        DTYPES[dtype],
        columnwise,
        offsets.data_ptr(),
        experts,
    )
    if first.is_cuda:
        extension().dequantize_grouped_cuda(*call, torch._C._cuda_getCurrentRawStream(first.get_device()))
    else:
        extension().dequantize_grouped_cpu(*call, torch.get_num_threads())
    return out


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


@lru_cache(maxsize=SHAPES_KEPT)
def _least(text: str, rows: int, cols: int, columnwise: bool) -> list[int]:
    """The fewest entries that each buffer can have for X [rows, cols]: those of one member with all rows, codes alone
    where there may be none."""
    p = plan(text)
    shapes = p.format.shapes(*((cols, rows) if columnwise else (rows, cols)))
    return [math.prod(shapes[name]) if rows and cols else 0 for name in p.names]


def _split_offsets(splits: Tensor, divisors: list[int], strides: list[int], check: bool) -> Tensor:
    splits, wide = splits.contiguous(), splits.dtype == torch.int64
    out = splits.new_empty((len(divisors), splits.numel() + 1), dtype=torch.int64)
    call = (splits.data_ptr(), wide, splits.numel(), divisors, strides, out.data_ptr())
    if not splits.is_cuda:
        extension().offsets_cpu(*call)
        return out
    overflow = splits.new_zeros(1, dtype=torch.int32) if check else None
    stream = torch._C._cuda_getCurrentRawStream(splits.get_device())
    extension().offsets_cuda(*call, 0 if overflow is None else overflow.data_ptr(), stream)
    if check and overflow.item():
        raise OverflowError("an offset does not fit in 64 bits")
    return out


_KEYS: dict[tuple, Tensor] = {}


def key_table(keys: Sequence[RngKey], device: torch.device) -> Tensor:
    """int32 [experts, 2]: the words of the experts' Philox keys. Kept, because slots and seeds are a training's own."""
    words = keys.words if isinstance(keys, RngKeys) else tuple(key.words for key in keys)
    table = _KEYS.get((device, words))
    if table is None:
        if len(_KEYS) >= KEPT_KEYS:
            _KEYS.clear()
        unsigned = torch.tensor([key.words for key in keys], dtype=torch.int64)
        table = unsigned.view(torch.int32).view(len(keys), 2, 2)[:, :, 0].contiguous().to(device)
        _KEYS[device, words] = table
    return table


def quantize_grouped(x: Tensor, *arguments) -> list[Tensor]:
    """hqsweep::quantize_grouped, directly where that is possible."""
    if direct(x):
        return (_quantize_grouped if x.is_cpu else _quantize_grouped_on_cuda)(x, *arguments)
    return torch.ops.hqsweep.quantize_grouped.default(x, *arguments)


def find_amax_grouped(x: Tensor, *arguments) -> None:
    """hqsweep::find_amax_grouped_, directly where that is possible."""
    if direct(x):
        return (_find_amax_grouped if x.is_cpu else _find_amax_grouped_on_cuda)(x, *arguments)
    torch.ops.hqsweep.find_amax_grouped_.default(x, *arguments)


def dequantize_grouped(
    buffers: list[Tensor], format: str, columnwise: bool, offsets: Tensor, rows: int, cols: int, exact: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Packed buffers of a format's text in layout order -> flat [rows * cols] in dtype, by rows of X: values, or exact:
    codes times block scales. Bytes are those of dequantize of each member. One launch; nothing waits for the offsets.

    ValueError for buffers of other types or fewer entries, and for offsets of another type.
    """
    arguments = (format, columnwise, offsets, rows, cols, exact, dtype)
    if direct(buffers[0]):
        return (_dequantize_grouped if buffers[0].is_cpu else _dequantize_grouped_on_cuda)(buffers, *arguments)
    return torch.ops.hqsweep.dequantize_grouped.default(buffers, *arguments)


def split_offsets(splits: Tensor, divisors: list[int], strides: list[int], check: bool = False) -> Tensor:
    """int32 or int64 [n] -> int64 [rules, n + 1] in one launch: row r begins with 0 and has strides[r] times the sums
    of ceil(splits / divisors[r]), where divisor 0 counts 1 for every split. At most 8 rules.

    OverflowError where an offset leaves int64: always on the CPU; on a GPU with `check`, which waits, else values wrap.
    """
    if direct(splits):
        return (_split_offsets if splits.is_cpu else _split_offsets_on_cuda)(splits, divisors, strides, check)
    return torch.ops.hqsweep.split_offsets.default(splits, divisors, strides, check)


_quantize_grouped_on_cuda, _split_offsets_on_cuda = on_its_device(_quantize_grouped), on_its_device(_split_offsets)
_library.impl("quantize_grouped", _quantize_grouped, "CPU")
_library.impl("quantize_grouped", _quantize_grouped_on_cuda, "CUDA")
_find_amax_grouped_on_cuda = on_its_device(_find_amax_grouped)
_library.impl("find_amax_grouped_", _find_amax_grouped, "CPU")
_library.impl("find_amax_grouped_", _find_amax_grouped_on_cuda, "CUDA")
_dequantize_grouped_on_cuda = on_its_device(_dequantize_grouped)
_library.impl("dequantize_grouped", _dequantize_grouped, "CPU")
_library.impl("dequantize_grouped", _dequantize_grouped_on_cuda, "CUDA")
_library.impl("split_offsets", _split_offsets, "CPU")
_library.impl("split_offsets", _split_offsets_on_cuda, "CUDA")
register_fake("hqsweep::quantize_grouped", _quantize_grouped_fake, lib=_library)
register_fake("hqsweep::find_amax_grouped_", lambda *_: None, lib=_library)
register_fake(
    "hqsweep::dequantize_grouped",
    lambda buffers, format, columnwise, offsets, rows, cols, exact, dtype: buffers[0].new_empty(
        rows * cols, dtype=dtype
    ),
    lib=_library,
)
register_fake(
    "hqsweep::split_offsets",
    lambda splits, divisors, strides, check: splits.new_empty((len(divisors), splits.numel() + 1), dtype=torch.int64),
    lib=_library,
)
