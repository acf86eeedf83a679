"""Quantize one matrix along its last axis: check, dispatch, return."""

from typing import Literal

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format, RngKey
from hqsweep.ops import kernel

Backend = Literal["auto", "reference", "kernel"]


def encode(
    x: Tensor, format: Format, *, grid: Buffers | None = None, key: RngKey | None = None, backend: Backend = "auto"
) -> dict[str, Tensor]:
    """bf16, fp16 or fp32 [rows, cols] -> the format's buffers; blocks run along cols.

    grid: amaxes agreed on elsewhere (another rank, an earlier pass); the reference takes it. key: stream of +sr.
    backend: "auto" is the kernel where there is one for the input and the reference elsewhere; the bytes are the same.
    """
    if _use_kernel(x, format, backend, grid is None and kernel.supports(x, format)):
        return kernel.encode(x, format, key)
    return format.encode(x, grid, key)


def exact_operand(x: Tensor, format: Format, *, key: RngKey | None = None, backend: Backend = "auto") -> ExactOperand:
    """What gemm=exact multiplies: format.operand(format.encode(x)), in one pass where there is a kernel.

    The matrix is bfloat16 from the reference and from the CUDA kernel, with the same bytes, and float32 from the CPU
    kernel (the same values wherever bfloat16 is exact). fp8_block+fp32_scale is float32 everywhere.
    """
    if _use_kernel(x, format, backend, kernel.supports(x, format)):
        return kernel.exact_operand(x, format, key)
    return format.operand(format.encode(x, None, key), tuple(x.shape))


def _use_kernel(x: Tensor, format: Format, backend: Backend, supported: bool) -> bool:
    if x.dim() != 2:
        raise ValueError(f"quantize: input has shape {tuple(x.shape)}; it takes a matrix [rows, cols]")
    if backend == "kernel" and not supported:
        raise UserError(f"no kernel for {format} of {x.dtype} {tuple(x.shape)} on {x.device}; use backend reference")
    return supported and backend != "reference"
