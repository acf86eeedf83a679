"""Checked options of a call, and the inputs that it takes beside X: keys of random bits, and amaxes.

Formats, source and outputs are checked once; each tensor is checked on every call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError, nearest
from hqsweep.formats import Buffers, Format, RngKey, RngKeys
from hqsweep.formats.random import PlacedKey
from hqsweep.formats.spec import SOURCES
from hqsweep.memo import memo
from hqsweep.ops.library import has_kernels, key_table
from hqsweep.ops.quantize.kernels import DTYPES, NO_KEY, KernelSpec, spec_named
from hqsweep.ops.splits import Splits

Output = Literal["codes", "exact"]
Source = Literal["original", "rowwise_dequantized"]
Backend = Literal["auto", "reference", "kernel"]
OUTPUTS = ("codes", "exact")
BACKENDS = ("auto", "reference", "kernel")


class Target(NamedTuple):
    """One direction of quantize(): the wanted result, and its inputs beside X."""

    format: Format | None
    output: Output = "codes"
    """ "codes": the format's buffers; "exact": the matrix that gemm=exact multiplies."""
    key: RngKey | Sequence[RngKey | None] | None = None
    """The stream of random bits for +sr; with splits, one per member."""
    grid: Buffers | Sequence[Buffers | None] | None = None
    """Amaxes found elsewhere; with splits, one grid per member."""
    by_rows: bool = False
    """Whether, with splits, exact columnwise members are stored as [m_e, width], which torch._grouped_mm takes."""


NO_TARGET = Target(None)


def as_target(wanted: Format | Target | None) -> Target:
    """Return the target. A format alone asks for its codes."""
    if wanted is None:
        return NO_TARGET
    return wanted if type(wanted) is Target else Target(wanted)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Checked options of a call, without its tensors."""

    row: KernelSpec | None
    column: KernelSpec | None
    dequantized: bool
    row_exact: bool
    column_exact: bool
    row_text: str
    """The rowwise format as operators name it; "" for none."""
    column_text: str
    multiples: tuple[int, int]
    """X's rows and columns must be multiples of these."""
    stochastic: bool
    delayed: bool
    kernels: bool
    """Whether all formats have a kernel."""
    some_kernel: bool
    """Whether at least one format has a kernel."""
    holds: bool
    """Whether an operand is the matrix itself, as with an identity format."""


def text_of(format: Format | None) -> str:
    """Return the canonical text of a format; "" for none."""
    return "" if format is None else format.text


@memo
def request_of(rowwise: str, columnwise: str, source: str, row_output: str, column_output: str) -> Request:
    """Return the checked request, made once. rowwise, columnwise: the formats' text_of. UserError for unknown names."""
    words = {
        "columnwise_source": (source, SOURCES),
        "rowwise output": (row_output, OUTPUTS),
        "columnwise output": (column_output, OUTPUTS),
    }
    for name, (word, known) in words.items():
        if word not in known:
            raise UserError(f"{name} is '{word}'{nearest(word, known)}; allowed: {', '.join(known)}")
    dequantized = source == "rowwise_dequantized" and columnwise != ""
    if dequantized and not rowwise:
        raise UserError("columnwise_source is rowwise_dequantized but there is no rowwise format")
    row, column = (spec_named(text) if text else None for text in (rowwise, columnwise))
    specs = [spec for spec in (row, column) if spec]
    row_holds = row is not None and row.format.high_precision
    column_holds = column is not None and column.format.high_precision and not dequantized
    return Request(
        row=row,
        column=column,
        dequantized=dequantized,
        row_exact=row_output == "exact",
        column_exact=column_output == "exact",
        row_text=row.text if row else "",
        column_text=column.text if column else "",
        multiples=(column.multiple if column else 1, row.multiple if row else 1),
        stochastic=any(spec.stochastic for spec in specs),
        delayed=any(spec.delayed for spec in specs),
        kernels=all(spec.compiled is not None for spec in specs),
        some_kernel=any(spec.compiled is not None for spec in specs),
        holds=row_holds or column_holds,
    )


def as_matrix(x: Tensor) -> Tensor:
    """Return x with its leading axes folded, without a copy if its strides allow. UserError for other dtypes."""
    if x.dtype not in DTYPES:
        raise UserError(f"quantize: input is {x.dtype}; it takes float32, bfloat16 and float16")
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        raise UserError(f"quantize: input has shape {tuple(x.shape)}; it takes [..., rows, cols]")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_shape(request: Request, shape: Sequence[int]) -> None:
    """Raise UserError if one of the formats cannot hold a matrix of this shape."""
    (rows, cols), (down, across) = shape, request.multiples
    if rows % down or cols % across:
        wrong = (request.row, "rowwise", "columns") if cols % across else (request.column, "columnwise", "rows")
        spec, direction, axis = wrong
        height, width = spec.format.tile
        raise UserError(
            f"quantize: {direction} {spec.text} takes a multiple of {spec.multiple} {axis} (its blocks are {height} x "
            f"{width}), and the matrix has shape {tuple(shape)}"
        )


def check_given(request: Request, row_grid: Buffers | None, column_grid: Buffers | None) -> None:
    """Raise UserError if a format with delayed scaling lacks its amax."""
    for direction, spec, grid in (
        ("rowwise", request.row, row_grid),
        ("columnwise", request.column, column_grid),
    ):
        if spec and spec.delayed and spec.amax_name not in (grid or ()):
            raise UserError(
                f"quantize: {direction} {spec.text} takes its scale from the amaxes of earlier steps, which the states"
                f" of a slot remember; give states, or a target with grid={{'{spec.amax_name}': amax}}"
            )


def check_backend(backend: str) -> None:
    """Raise UserError for an unknown backend."""
    if backend not in BACKENDS:
        raise UserError(f"backend is '{backend}'{nearest(backend, BACKENDS)}; allowed: {', '.join(BACKENDS)}")


def use_kernel(
    request: Request, x: Tensor, backend: Backend, row_grid: Buffers | None = None, column_grid: Buffers | None = None
) -> bool:
    """Return whether the kernels take this matrix. UserError if they do not and backend is "kernel"."""
    if backend != "auto":
        check_backend(backend)
        if backend == "reference":
            return False
    supported = request.kernels and has_kernels("cpu" if x.is_cpu else x.device.type)
    if row_grid is not None or column_grid is not None:
        for spec, grid in ((request.row, row_grid), (request.column, column_grid)):
            if spec and grid is not None and (len(grid) != 1 or spec.amax_name not in grid):
                supported = False  # it has amaxes of blocks
    if backend == "kernel" and not supported:
        texts = " and ".join(spec.text for spec in (request.row, request.column) if spec)
        raise UserError(f"no kernel for {texts} of {x.dtype} {tuple(x.shape)} on {x.device}; use backend reference")
    return supported


def key_words(spec: KernelSpec | None, key: RngKey | PlacedKey | None) -> list[int]:
    """Return the words of a Philox key and its step, and the place of a part; NO_KEY without random bits."""
    if spec is None or not spec.stochastic:
        return NO_KEY
    if key is None:
        raise ValueError(f"{spec.text}: encode needs an RngKey")
    return [*key.words, key.step, *(key.segments if isinstance(key, PlacedKey) else ())]


def kernel_takes(request: Request, x: Tensor, splits: Splits) -> bool:
    """Return whether one kernel call takes all members.

    Blocks must divide the matrix, and each member's rows if the host knows them.
    """
    if not (request.kernels and (request.row or request.column) and has_kernels(x.device.type)):
        return False
    down, across = request.multiples
    return x.shape[1] % across == 0 and (down == 1 or splits.sizes is None or splits.divisor % down == 0)


class Inputs(NamedTuple):
    """Keys and amaxes of one matrix, or of all members, for the operator."""

    row_key: list[int]
    column_key: list[int]
    row_amax: Tensor | None
    column_amax: Tensor | None
    row_keys: Tensor | None = None
    column_keys: Tensor | None = None
    step: Tensor | None = None
    """The tensor that holds the step for all keys, in place of the keys' own step."""


NO_INPUTS = Inputs(NO_KEY, NO_KEY, None, None)


def matrix_inputs(request: Request, row: Target, column: Target) -> Inputs:
    """Return the inputs of one matrix."""
    row_key, column_key, step = NO_KEY, NO_KEY, None
    if request.stochastic:
        row_key, column_key = key_words(request.row, row.key), key_words(request.column, column.key)
        step = _counter_of([key for key in (row.key, column.key) if key is not None])
    elif row.grid is None and column.grid is None:
        return NO_INPUTS
    row_amax = None if row.grid is None or request.row is None else row.grid[request.row.amax_name]
    column_amax = None if column.grid is None or request.column is None else column.grid[request.column.amax_name]
    return Inputs(row_key, column_key, row_amax, column_amax, step=step)


def _counter_of(keys: Sequence[RngKey | RngKeys]) -> Tensor | None:
    """Return the counter that all keys share. ValueError if they have several."""
    counter = keys[0].counter
    if any(key.counter is not counter for key in keys):
        raise ValueError("the keys of one call have several counters; give all the same one, or none")
    return counter


def of_member(target: Target, member: int) -> Target:
    """Return the target of a single member."""
    key, grid = (values and values[member] for values in (target.key, target.grid))
    return target._replace(key=key, grid=grid)


def member_inputs(request: Request, row: Target, column: Target, device: torch.device) -> Inputs | None:
    """Return the inputs of all members, or None if each member needs a call of its own.

    That is so for inputs that one kernel call does not take, and for inputs that a member's own call refuses.
    """
    if not (request.stochastic or request.delayed or row.grid is not None or column.grid is not None):
        return NO_INPUTS
    step, counters, tables, amaxes = None, [], [], []
    for spec, target in ((request.row, row), (request.column, column)):
        try:
            amaxes.append(_amaxes(spec, target.grid))
        except LookupError:
            return None
        if spec is None or not spec.stochastic:
            tables.append(None)
            continue
        keys = target.key
        if keys is None or (not isinstance(keys, RngKeys) and None in keys):
            return None
        # Compared, not hashed: torch.compile would trace a graph per step number.
        steps = [keys.step] if isinstance(keys, RngKeys) else [key.step for key in keys]
        step = steps[0] if step is None else step
        if any(other != step for other in steps):
            return None
        counters += [keys] if isinstance(keys, RngKeys) else keys
        tables.append(key_table(keys, device))
    key = [0, 0, step or 0]
    return Inputs(key, key, *amaxes, *tables, _counter_of(counters) if counters else None)


def _amaxes(spec: KernelSpec | None, grids: Sequence[Buffers | None] | None) -> Tensor | None:
    """Return the given global amaxes of all members, concatenated. LookupError for grids that the kernel refuses."""
    if spec is None or grids is None or all(grid is None for grid in grids):
        if spec is not None and spec.delayed:
            raise LookupError
        return None
    if any(grid is None or set(grid) != {spec.amax_name} for grid in grids):
        raise LookupError
    return torch.cat([grid[spec.amax_name].reshape(-1) for grid in grids])
