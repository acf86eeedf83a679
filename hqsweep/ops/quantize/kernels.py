"""KernelSpec: the facts about a format that the compiled extension needs, computed once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, parse
from hqsweep.memo import memo
from hqsweep.ops.library import described, extension, has_kernels

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element dtypes and their numbers in the extension."""
TILE = 128
"""Side of the tiles of X over which statistics are summed."""
SUMS = 8
"""Sums per tile (csrc/quantize.h, TileSums)."""
NO_KEY = [0, 0, 0]
"""Philox key words and step of a call without random bits."""


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), or x itself if its dtype already matches.

    UserError for dtypes that are not floating: a complex number would lose its imaginary part.
    """
    if x.dtype is dtype:
        return x
    if not x.dtype.is_floating_point:
        raise UserError(f"got {x.dtype} {list(x.shape)} where {dtype} is computed with; it takes floating dtypes alone")
    return x.to(dtype)


def matrix_dtype(x: Tensor) -> int:
    """Return the extension's number for X's dtype. ValueError unless X is a matrix that the kernels can read."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or x.dim() != 2:
        raise ValueError(f"x is {described(x)}; it takes float32, bfloat16 or float16 with two axes")
    return dtype


def input_in(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a module's input in dtype. UserError for dtypes outside DTYPES, naming the module.

    torch's modules refuse them too: integers, complex numbers, float64 and FP8.
    """
    if x.dtype is dtype:
        return x
    if x.dtype not in DTYPES:
        took = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UserError(f"{name}: its input is {x.dtype} {list(x.shape)}; it takes {took}, so cast the input")
    return x.to(dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelSpec:
    """Facts shared by all kernel calls for one format.

    It has no methods: torch.compile cannot guard bound methods of objects that a constant_result returns.
    """

    format: Format
    text: str
    """The canonical text. Operators name the format by it."""
    compiled: object | None
    """The extension's Spec, or None without a kernel."""
    names: tuple[str, ...]
    """The buffers' names in layout order, which is also the operators' order."""
    buffers: tuple[tuple[str, int, int, torch.dtype], ...]
    """Name, rows and columns per entry, and dtype. Graphs can be traced through these plain values."""
    amax_name: str | None
    """The buffer of a grid that holds a global amax: the only one that kernels take."""
    delayed: bool
    """Whether that amax comes from earlier steps and must be given."""
    multiple: int
    """The contracted axis must be a multiple of this."""
    row_scaled: bool
    stochastic: bool
    divisor: float
    """The divisor of the exact operand."""
    cpu_exact_dtype: torch.dtype
    """dtype of the exact matrix on the CPU."""
    gpu_exact_dtype: torch.dtype
    """dtype of the exact matrix on a GPU."""


@memo
def spec_named(text: str) -> KernelSpec:
    """Return the KernelSpec of a format's text, made once.

    It takes a text, since torch.compile of torch 2.11 accepts no frozen dataclass as argument of a constant function.
    """
    format = parse(text)
    fields, compiled = format.kernel_fields, None
    if fields and extension():
        compiled = extension().Spec(**fields, tile_rows=format.tile[0], tile_cols=format.tile[1])
    return KernelSpec(
        format=format,
        text=format.text,
        compiled=compiled,
        names=tuple(format.layout),
        buffers=tuple((name, b.rows, b.cols, b.dtype) for name, b in format.layout.items()),
        amax_name=format.amax_name,
        delayed=format.delayed,
        multiple=format.column_multiple,
        row_scaled=format.row_scaled,
        stochastic=format.stochastic,
        divisor=format.divisor,
        cpu_exact_dtype=format.exact_dtype(False),
        gpu_exact_dtype=format.exact_dtype(True),
    )


def kernel_of(text: str) -> KernelSpec:
    """Return spec_named(text). ValueError for a format without a kernel."""
    spec = spec_named(text)
    if spec.compiled is None:
        raise ValueError(f"{spec.text} has no kernel in this build; the operators take formats that have")
    return spec


def supports(x: Tensor, *formats: Format) -> bool:
    """Return whether the kernels take this input in these formats: all but Identity, on CPU and CUDA."""
    known = all(spec_named(format.text).compiled is not None for format in formats)
    return x.dtype in DTYPES and has_kernels(x.device.type) and known
