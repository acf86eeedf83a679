"""A request to quantize: formats, source and outputs are checked once and kept; each tensor, when it comes."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hqsweep.errors import UserError, nearest
from hqsweep.formats import Buffers, Format, RngKey
from hqsweep.memo import constant_result
from hqsweep.ops.dequantize import BACKENDS, Backend
from hqsweep.ops.plan import DTYPES, NO_KEY, Plan, has_kernels, plan_of

Output = Literal["codes", "exact"]
Source = Literal["original", "rowwise_dequantized"]
OUTPUTS, SOURCES = ("codes", "exact"), ("original", "rowwise_dequantized")
NOTHING_GIVEN = (None, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What a call asks for beside its tensors: checked once, and laid out so that a call has little left to do."""

    row: Plan | None
    column: Plan | None
    dequantized: bool
    row_exact: bool
    column_exact: bool
    row_text: str
    """As operators name the format; "" for none."""
    column_text: str
    multiples: tuple[int, int]
    """What X's rows and columns must be multiples of."""
    stochastic: bool
    delayed: bool
    kernels: bool
    """Whether all formats have one."""
    holds: bool
    """Whether an operand is the matrix itself, which an identity holds."""


_REQUESTS: dict[tuple, Request] = {}


@constant_result
def request_of(
    rowwise: Format | None, columnwise: Format | None, source: str, row_output: str, column_output: str
) -> Request:
    """The request, made and checked once."""
    asked = (rowwise, columnwise, source, row_output, column_output)
    found = _REQUESTS.get(asked)
    if found is None:
        found = _REQUESTS[asked] = _checked(*asked)
    return found


def _checked(rowwise, columnwise, source, row_output, column_output) -> Request:
    given = {"columnwise_source": (source, SOURCES), "rowwise_output": (row_output, OUTPUTS)}
    for name, (word, known) in (given | {"columnwise_output": (column_output, OUTPUTS)}).items():
        if word not in known:
            raise UserError(f"{name} is '{word}'{nearest(word, known)}; allowed: {', '.join(known)}")
    dequantized = source == "rowwise_dequantized" and columnwise is not None
    if dequantized and rowwise is None:
        raise UserError("columnwise_source is rowwise_dequantized but there is no rowwise format")
    row, column = (f and plan_of(f) for f in (rowwise, columnwise))
    return Request(
        row=row,
        column=column,
        dequantized=dequantized,
        row_exact=row_output == "exact",
        column_exact=column_output == "exact",
        row_text=row.text if row else "",
        column_text=column.text if column else "",
        multiples=(column.multiple if column else 1, row.multiple if row else 1),
        stochastic=any(p.stochastic for p in (row, column) if p),
        delayed=any(p.delayed for p in (row, column) if p),
        kernels=all(p.spec is not None for p in (row, column) if p),
        holds=bool(
            (rowwise and rowwise.high_precision) or (columnwise and columnwise.high_precision and not dequantized)
        ),
    )


def as_matrix(x: Tensor) -> Tensor:
    """x with its leading axes folded, without a copy where its strides allow that."""
    if x.dtype not in DTYPES:
        raise UserError(f"quantize: input is {x.dtype}; it takes float32, bfloat16 and float16")
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        raise UserError(f"quantize: input has shape {tuple(x.shape)}; it takes [..., rows, cols]")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_shape(request: Request, x: Tensor) -> None:
    (rows, cols), (down, across) = x.shape, request.multiples
    if rows % down or cols % across:
        wrong = (request.row, "rowwise", "columns") if cols % across else (request.column, "columnwise", "rows")
        p, direction, axis = wrong
        height, width = p.format.tile
        raise UserError(
            f"quantize: {direction} {p.text} takes a multiple of {p.multiple} {axis} (its blocks are {height} x "
            f"{width}), and the matrix has shape {tuple(x.shape)}"
        )


def check_given(request: Request, grids: tuple[Buffers | None, Buffers | None]) -> None:
    """UserError for a format with delayed scaling whose amax is not given."""
    for direction, p, grid in zip(("rowwise", "columnwise"), (request.row, request.column), grids, strict=True):
        if p and p.delayed and p.amax_name not in (grid or ()):
            raise UserError(
                f"quantize: {direction} {p.text} takes its scale from the amaxes of earlier steps, which the states of"
                f" a slot remember; give states, or {direction}_grid={{'{p.amax_name}': amax}}"
            )


def use_kernel(request: Request, x: Tensor, grids: tuple[Buffers | None, Buffers | None], backend: Backend) -> bool:
    if backend == "reference":
        return False
    if backend not in BACKENDS:
        raise UserError(f"backend is '{backend}'{nearest(backend, BACKENDS)}; allowed: {', '.join(BACKENDS)}")
    supported = request.kernels and has_kernels(x.device.type)
    if grids != NOTHING_GIVEN:
        for p, grid in zip((request.row, request.column), grids, strict=True):
            if p and grid is not None and (len(grid) != 1 or p.amax_name not in grid):
                supported = False  # amaxes of blocks
    if backend == "kernel" and not supported:
        texts = " and ".join(p.text for p in (request.row, request.column) if p)
        raise UserError(f"no kernel for {texts} of {x.dtype} {tuple(x.shape)} on {x.device}; use backend reference")
    return supported


def key_words(p: Plan | None, key: RngKey | None) -> list[int]:
    if p is None or not p.stochastic:
        return NO_KEY
    if key is None:
        raise ValueError(f"{p.text}: encode needs an RngKey")
    return [*key.words, key.step]
