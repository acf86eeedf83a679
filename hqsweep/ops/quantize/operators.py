"""The operator hqsweep::quantize: the tensors that it returns, and the extension's Directions with their addresses.

find_amax_ and dequantize stand in ops.quantize.amax and ops.quantize.dequantize. Each operator is one function: its
schema, its outputs in traced graphs, and the kernel that it calls. Bytes equal the reference's. Formats are passed as
canonical text, "" for an unwanted direction. Work is enqueued on the current stream, and nothing waits for it. Modules
provide the gradients.

offsets: None for one matrix. Otherwise int64 [members + 1]: the first row of each matrix (member) among the rows of X,
and the end of the last one. Each member is quantized by itself, in one call. On CUDA nothing waits for offsets, and a
graph serves any splits of as many rows. Outputs are packed (ops.layout): with exact sizes if the host gives
`sizes`, else with room for any sizes. Entries after the last member are undefined. Offsets begin with 0, do not
decrease, end within X and agree with `sizes`. The CPU checks this. On a GPU the caller guarantees it: wrong offsets can
make kernels write out of bounds.

step: int64 [1] on X's device. When the kernel runs, all keys of the call take their step from it. None: keys have
steps.

Everything else that kernels access by address is checked here: dtypes, devices, shapes, gaps, numbers of entries, keys.
ValueError names the fault. Direct callers of hqsweep._C must check by themselves.
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.memo import memo
from hqsweep.ops.library import (
    check_keys,
    check_offsets,
    check_sizes,
    extension,
    in_one_memory,
    operator,
    step_address,
    where,
)
from hqsweep.ops.quantize.kernels import DTYPES, NO_KEY, SUMS, TILE, KernelSpec, kernel_of, matrix_dtype, spec_named
from hqsweep.ops.quantize.nonfinite import NOBODY, address_of, look_at_trace
from hqsweep.torch_private import empty_strided_cpu, empty_strided_cuda

Allocation = tuple[tuple[int, ...], torch.dtype]
ADDRESSES = ("amax", "found", "codes", "scales", "global", "exact", "exact_dtype", "sums", "row_errors")
"""The arguments of the extension's Direction, from the fifth on."""


class Matrices(NamedTuple):
    """The size of X, and the matrices that own its rows. Without members, X is one matrix."""

    rows: int
    cols: int
    members: int | None = None
    """The number of matrices that own the rows, one after the other."""
    sizes: tuple[int, ...] | None = None
    """The rows of each member, if the host knows them."""


class Wanted(NamedTuple):
    """The wanted result of one direction."""

    text: str
    columnwise: bool
    exact: bool
    amax_given: bool
    """Whether the global amaxes are given."""
    statistics: bool = False
    by_rows: bool = False
    """Whether exact values of columnwise members are stored in the element order of X."""
    decoded: bool = False
    """Whether the exact matrix is wanted after the codes of one matrix.

    All buffers then share one memory; each starts at a multiple of 16 bytes.
    """


class Outputs(NamedTuple):
    """The tensors of one direction, equal for all calls of one shape."""

    spec: KernelSpec
    tensors: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, stride and dtype of each tensor: the operator's outputs in order, then scratch."""
    scratch: int
    """The number of trailing tensors that are scratch, needed only until the call has run."""
    places: list[tuple[int, int]]
    """Pairs of a tensor's index and its place in ADDRESSES."""
    exact_dtype: int
    amaxes: int
    """The number of global amaxes."""
    by_rows: bool
    columnwise: bool
    together: int = 0
    """The number of leading tensors that share one memory."""


def allocations(x: Matrices, wanted: Wanted, on_gpu: bool) -> list[Allocation]:
    """Return shape and dtype of each output of one direction: buffers, or exact matrix and factor; then sums and row
    errors.

    A given global amax that is itself a buffer is left out. Members are packed and flat: with exact sizes if the host
    knows them, else with room for any sizes.
    """
    spec = spec_named(wanted.text)
    held = "g" if wanted.amax_given and spec.amax_name == "g" else None
    if wanted.exact:
        buffers = [(1, 1, spec.gpu_exact_dtype if on_gpu else spec.cpu_exact_dtype)]
        if spec.amax_name and spec.amax_name != held:
            factor = spec.format.layout[spec.amax_name]
            buffers.append((factor.rows, factor.cols, torch.float32))
    else:
        buffers = [(down, across, dtype) for name, down, across, dtype in spec.buffers if name != held]
        buffers += [(1, 1, spec.gpu_exact_dtype if on_gpu else spec.cpu_exact_dtype)] * wanted.decoded
    if x.members is not None:
        return [((packed_entries(x, wanted.columnwise, down, across),), dtype) for down, across, dtype in buffers]
    rows, cols = (x.cols, x.rows) if wanted.columnwise else (x.rows, x.cols)
    shapes: list[Allocation] = [
        ((-(-rows // down) if down else 1, -(-cols // across) if across else 1), dtype)
        for down, across, dtype in buffers
    ]
    if wanted.statistics:
        tiles_down, tiles_across = -(-rows // TILE), -(-cols // TILE)
        shapes += [((tiles_down * tiles_across, SUMS), torch.float32), ((rows, tiles_across), torch.float32)]
    return shapes


def packed_entries(x: Matrices, columnwise: bool, down: int, across: int) -> int:
    """Return the number of entries of a packed buffer, or an upper bound if the sizes are unknown.

    Each entry covers `down` x `across` elements of a member's operand; 0 covers the whole axis.
    """
    ragged, other = (across, down) if columnwise else (down, across)
    if x.sizes is not None:
        along = sum(-(-size // ragged) if ragged else 1 for size in x.sizes)
    else:
        along = x.rows // ragged + x.members * (ragged > 1) if ragged else x.members
    return along * (-(-x.cols // other) if other else 1)


def amax_count(spec: KernelSpec, x: Matrices, columnwise: bool) -> int:
    """Return the number of amaxes of a direction: one per matrix, or per operand row for a row_scaled format."""
    members = 1 if x.members is None else x.members
    if not spec.row_scaled:
        return members
    return members * x.cols if columnwise else x.rows


@memo
def outputs_of(x: tuple, rowwise: tuple | None, columnwise: tuple | None, on_gpu: bool) -> tuple[Outputs | None, ...]:
    """Return the Outputs of both directions, made once per shape.

    The arguments are Matrices, Wanted and Wanted as plain tuples, which are cheaper to make.
    """
    x = Matrices(*x)
    if x.sizes is not None and (len(x.sizes) != x.members or sum(x.sizes) != x.rows):
        got = f"{len(x.sizes)} sizes of {sum(x.sizes)} rows"
        raise ValueError(f"{got} for {x.members} members and a matrix of shape {(x.rows, x.cols)}")
    return tuple(wanted and _outputs(x, Wanted(*wanted), on_gpu) for wanted in (rowwise, columnwise))


def _outputs(x: Matrices, wanted: Wanted, on_gpu: bool) -> Outputs:
    if wanted.statistics and x.members is not None:
        raise ValueError("statistics are gathered for one matrix, and offsets are given")
    spec = kernel_of(wanted.text)
    if spec.delayed and not wanted.amax_given:
        raise ValueError(f"{spec.text} takes its scale from the amaxes of earlier steps, and none is given")
    shapes = allocations(x, wanted, on_gpu)
    names = ["exact" if wanted.exact else "codes"]
    if wanted.exact:
        factor = None if wanted.amax_given and spec.amax_name == "g" else spec.amax_name
        names += {"g": ["global"], "s": ["scales"]}.get(factor, [])
    else:
        names += ["scales", "global"][: len(shapes) - 1 - 2 * wanted.statistics - wanted.decoded]
    names += ["exact"] * wanted.decoded + ["sums", "row_errors"] * wanted.statistics
    exact_dtype, scratch = DTYPES[shapes[names.index("exact")][1]] if "exact" in names else 0, 0
    if spec.amax_name == "s" and not wanted.amax_given:  # the scale overwrites its buffer last
        shapes.append(((amax_count(spec, x, wanted.columnwise),), torch.float32))
        names.append("found")
        scratch = 1
    places = [(i, ADDRESSES.index(name)) for i, name in enumerate(names)]
    places += [(i, ADDRESSES.index("found")) for i, name in enumerate(names) if name == "global"]
    tensors = [(shape, (shape[1] or 1, 1) if len(shape) == 2 else (1,), dtype) for shape, dtype in shapes]
    amaxes, together = amax_count(spec, x, wanted.columnwise), names.index("exact") if wanted.decoded else 0
    sides = wanted.by_rows, wanted.columnwise
    return Outputs(spec, tensors, scratch, places, exact_dtype, amaxes, *sides, together)


class Stream(NamedTuple):
    """The random bits of one direction, as the extension takes them."""

    key: list[int]
    """Two words and the step, checked by stream_of."""
    place: list[int]
    """For a part of an operand: its first segment, and the segments between its rows. [] for a whole operand."""
    table: int
    """The address of the members' words, or 0."""
    step_at: int
    """The address of a step that replaces the key's step, or 0."""


NO_STREAM = Stream(NO_KEY, [], 0, 0)


def stream_of(key: list[int], keys: Tensor | None, step_at: int) -> Stream:
    """Return the Stream of a key. keys: the members' key table. ValueError for an invalid key."""
    if len(key) not in (3, 5) or (len(key) == 5 and keys is not None):
        refuse_key(key)
    return Stream(key[:3], key[3:], 0 if keys is None else keys.data_ptr(), step_at)


def direction(
    outputs: Outputs,
    x: Tensor,
    tensors: list[Tensor],
    scratch: list[Tensor],
    stream: Stream,
    amax: Tensor | None,
    slot: int = NOBODY,
):
    """Return the extension's Direction that fills new outputs, which are appended to `tensors`.

    scratch: receives tensors that must live until the call has run. amax: the members' amaxes, concatenated. slot: see
    ops.quantize.nonfinite.
    """
    allocate = empty_strided_cuda if x.is_cuda else empty_strided_cpu
    allocated = in_one_memory(x, outputs.tensors[: outputs.together]) if outputs.together else []
    allocated += [allocate(*wanted) for wanted in outputs.tensors[outputs.together :]]
    addresses = [0, 0, 0, 0, 0, 0, outputs.exact_dtype, 0, 0]
    for i, place in outputs.places:
        addresses[place] = allocated[i].data_ptr()
    if amax is not None:
        check_amax(outputs.spec, "given amax", amax, outputs.amaxes, x)
        addresses[0] = amax.data_ptr()
    if outputs.scratch:
        scratch += allocated[-outputs.scratch :]
        del allocated[-outputs.scratch :]
    tensors += allocated
    key, place, table, step_at = stream
    seen = address_of(x, slot, outputs.columnwise, outputs.spec.format)
    rest = (table, outputs.by_rows, step_at, *(place or (0, 0)), seen)
    try:
        return extension().Direction(outputs.spec.compiled, *key, *addresses, *rest)
    except TypeError:
        refuse_key([*key, *place])


def finder(
    spec: KernelSpec,
    count: int,
    x: Tensor,
    stream: Stream,
    amax: Tensor | None,
    amax_out: Tensor | None,
    seen: int = 0,
):
    """Return a Direction that only finds `count` global amaxes and writes them to amax_out. seen: from address_of()."""
    if spec.amax_name is None and (amax is not None or amax_out is not None):
        raise ValueError(f"{spec.text} has no global amax to give or to find")
    check_amax(spec, "given amax", amax, count, x)
    check_amax(spec, "found amax", amax_out, count, x)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (amax, amax_out))
    key, place, table, step_at = stream
    placed = dict(zip(("first_segment", "segments_across"), place, strict=False))
    try:
        return extension().Direction(spec.compiled, *key, *addresses, keys=table, step_at=step_at, **placed, seen=seen)
    except TypeError:
        refuse_key([*key, *place])


def refuse_key(key: list[int]) -> NoReturn:
    """Raise ValueError for an invalid key."""
    raise ValueError(
        f"a key is {key}; it takes two words of 32 bits and a step, and of a part of an operand the first segment and"
        " the segments between rows, none of them negative"
    ) from None


def check_amax(spec: KernelSpec, name: str, amax: Tensor | None, count: int, x: Tensor) -> None:
    """Raise UserError unless `amax` holds the `count` numbers that kernels read by address."""
    if amax is None:
        return
    if amax.numel() == count and amax.dtype is torch.float32 and amax.is_contiguous() and amax.device == x.device:
        return
    got = f"{amax.dtype} of shape {tuple(amax.shape)} on {amax.device}"
    got += "" if amax.is_contiguous() else ", not contiguous"
    raise UserError(f"{name} for {spec.text} is {got}; it takes {count} contiguous float32 on {x.device}")


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
    """Return the outputs for the rows of X, then for its columns (allocations).

    seen: the slot number for which kernels record NaN and inf (ops.quantize.nonfinite).
    """
    dtype, on_gpu = matrix_dtype(x), x.is_cuda
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
