"""Activations between the two linears of an MLP: on hqsweep's CUDA kernels, or by torch's operators, the reference."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.nn.core.context import use_kernels
from hqsweep.ops.model.activation import activation, activation_backward, takes
from hqsweep.ops.quantize.kernels import in_dtype


def gelu(x: Tensor) -> Tensor:
    """GELU(x) by its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(g) * u with [g, u] = x: half the width (Shazeer, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "swiglu": swiglu}
"""Name -> function. ops.activation.INPUTS has the ratio of the widths of input and output."""


class ActivationFunction(torch.autograd.Function):
    """z bfloat16 [..., W] -> h bfloat16 [..., W / inputs], by the kernels. It saves z. Its gradient cannot be
    differentiated again; the linears around it refuse gradients of gradients."""

    @staticmethod
    def forward(ctx, z: Tensor, kind: str, end: Tensor | None = None) -> Tensor:
        rows = z.reshape(-1, z.shape[-1]).contiguous()
        ctx.kind = kind
        ctx.save_for_backward(rows, end)
        h = activation(rows, kind, False, None, end)[0]
        return h if z.dim() == 2 else h.view(*z.shape[:-1], h.shape[-1])

    @staticmethod
    def backward(ctx, dh: Tensor) -> tuple[Tensor, None, None]:
        rows, end = ctx.saved_tensors
        matrix = in_dtype(dh, rows.dtype).reshape(-1, dh.shape[-1]).contiguous()
        dz = activation_backward(matrix, rows, ctx.kind, False, None, end)[0]
        return dz if dh.dim() == 2 else dz.view(*dh.shape[:-1], dz.shape[-1]), None, None


def activate(z: Tensor, kind: str, end: Tensor | None = None) -> Tensor:
    """Return activation(z) [..., W / inputs] of z [..., W], computed in float32.

    end: int64 [1] on the device, the number of rows in use; later rows may be skipped. The result is bfloat16 if
    use_kernels chooses the kernels and they take z, else float32 by torch's operators. A linear that rounds it to
    bfloat16 reads the same values either way, except for the kernels' exponential.
    """
    if use_kernels(z) and takes(z, kind):
        return ActivationFunction.apply(z, kind, end)
    return ACTIVATIONS[kind](z.float())
