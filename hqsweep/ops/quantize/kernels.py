"""KernelSpec: what the compiled extension needs to know about a format, worked out once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, parse
from hqsweep.memo import memo
from hqsweep.ops.library import extension, has_kernels

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of elements, by the extension's numbers."""
TILE = 128
"""Side of the tiles of X over which statistics are summed."""
SUMS = 8
"""Sums per tile (csrc/quantize.h, TileSums)."""
NO_KEY = [0, 0, 0]
"""Philox key words and step where nothing is random."""


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), skipping the call when the dtype already matches; UserError for values that are no floats, whose
    imaginary parts would be lost."""
    if x.dtype is dtype:
        return x
    if not x.dtype.is_floating_point:
        raise UserError(f"got {x.dtype} {list(x.shape)} where {dtype} is computed with; it takes floating dtypes alone")
    return x.to(dtype)


def input_in(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """in_dtype() of the input of the module of that name; UserError for dtypes that DTYPES lacks, which torch's modules
    refuse too: integers, complex numbers, float64 and FP8."""
    if x.dtype is dtype:
        return x
    if x.dtype not in DTYPES:
        took = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UserError(f"{name}: its input is {x.dtype} {list(x.shape)}; it takes {took}, so cast the input")
    return x.to(dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelSpec:
    """Everything that calls of the kernels for one format share.

    It has no methods, because torch.compile cannot guard bound methods of objects that a constant_result returns.
    """

    format: Format
    text: str
    """The canonical text, by which operators name the format."""
    compiled: object | None
    """The extension's Spec, or None without a kernel."""
    names: tuple[str, ...]
    """The format's buffers in the order of its layout, which is that of the operators."""
    buffers: tuple[tuple[str, int, int, torch.dtype], ...]
    """Name, rows and columns per entry, dtype (plain values, which graphs can be traced through)."""
    amax_name: str | None
    """The buffer of a grid that is a global amax: the only one that kernels take."""
    delayed: bool
    """Whether that amax must be given, because the format's comes from earlier steps."""
    multiple: int
    """The number that the length of the contracted axis must be a multiple of."""
    row_scaled: bool
    stochastic: bool
    divisor: float
    """The divisor of the exact operand."""
    cpu_exact_dtype: torch.dtype
    """The dtype of the matrix that gemm=exact multiplies on the CPU."""
    gpu_exact_dtype: torch.dtype
    """The dtype of that matrix on a GPU."""


@memo
def spec_named(text: str) -> KernelSpec:
    """The kernel spec of a format's text, made once. By text, as operators know formats too: of a function whose result
    is constant, torch.compile of torch 2.11 takes no frozen dataclass as an argument."""
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
    """spec_named of a format that has a kernel; ValueError for any other."""
    spec = spec_named(text)
    if spec.compiled is None:
        raise ValueError(f"{spec.text} has no kernel in this build; the operators take formats that have")
    return spec


def supports(x: Tensor, *formats: Format) -> bool:
    """Whether the kernels take this input in these formats: all but Identity, on CPU and on CUDA."""
    known = all(spec_named(format.text).compiled is not None for format in formats)
    return x.dtype in DTYPES and has_kernels(x.device.type) and known
