"""Decode an operand: to its values, or to the exact matrix that gemm=exact multiplies."""

from typing import Literal

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.ops.plan import DTYPES, Plan, has_kernels, plan_of

Backend = Literal["auto", "reference", "kernel"]
BACKENDS = ("auto", "reference", "kernel")


def dequantize(
    buffers: Buffers,
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Buffers of an operand -> its values [rows, cols] in TransformerEngine's order of operations, rounded to dtype
    (default float32). UserError for buffers of other shapes or types than the format's."""
    dtype, p = dtype or torch.float32, plan_of(format)
    tensors = _tensors(buffers, p, shape)
    if _by_kernel(tensors, p, backend, dtype):
        return torch.ops.hqsweep.dequantize.default(tensors, p.text, *shape, False, dtype)
    return format.decode(buffers, shape).to(dtype)


def exact_operand_of(
    buffers: Buffers, format: Format, shape: tuple[int, int], backend: Backend = "auto"
) -> ExactOperand:
    """Buffers of an operand -> what gemm=exact multiplies, as quantize(..., rowwise_output="exact") gives it."""
    p = plan_of(format)
    tensors = _tensors(buffers, p, shape)
    dtype = Plan.exact_dtype(p, tensors[0].is_cuda)
    if not _by_kernel(tensors, p, backend, dtype):
        return format.operand(buffers, shape)
    matrix = torch.ops.hqsweep.dequantize.default(tensors, p.text, *shape, True, dtype)
    return ExactOperand(matrix, buffers[p.amax_name] if p.amax_name else None, p.divisor)


def _tensors(buffers: Buffers, p: Plan, shape: tuple[int, int]) -> list[Tensor]:
    """The buffers in layout order, contiguous, after a check against the layout."""
    rows, cols = shape
    made = []
    for name, down, across, dtype in p.buffers:
        tensor, wanted = buffers.get(name), (-(-rows // down) if down else 1, -(-cols // across) if across else 1)
        if tensor is None or tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            got = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UserError(
                f"dequantize: buffer {name} of a {p.text} operand {tuple(shape)} is {got}, not {dtype} {wanted}"
            )
        made.append(tensor)
    return [t.contiguous() for t in made] if p.spec else made


def _by_kernel(tensors: list[Tensor], p: Plan, backend: Backend, dtype: torch.dtype) -> bool:
    if backend not in BACKENDS:
        raise UserError(f"backend is '{backend}'; allowed: {', '.join(BACKENDS)}")
    supported = p.spec is not None and has_kernels(tensors[0].device.type) and dtype in DTYPES
    if backend == "kernel" and not supported:
        raise UserError(f"no kernel decodes {p.text} to {dtype} on {tensors[0].device}; use backend reference")
    return supported and backend != "reference"
