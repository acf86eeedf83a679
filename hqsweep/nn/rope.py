"""Attention of a joined qkv projection: rotary positions, heads, and both with the attention in one autograd function.

On a GPU, splitting and rotating a projection is one pass in each direction (ops.attention): v is never copied, and the
gradients of q, k and v are joined without a concatenation. torch's operators are the reference and serve other devices.
They may fuse a product and a sum into one rounding, so a GPU's result can differ in an element's last bit.

AttendJoined is attention of the joined projection, rotated in place, as one autograd function. Its backward writes the
gradient straight into the gradient of the projection and rotates it there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.residual import is_observed
from hqsweep.nn.sdpa import CUDNN, cudnn_forward, way_back
from hqsweep.ops.attention import attention_back, fits, frequencies, join_heads, readable, rope, rope_
from hqsweep.ops.library import direct

Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v, [B, H, T, E] each."""


def split_heads(qkv: Tensor, heads: int, base: float | None, *, in_place: bool = False) -> Heads:
    """Return q, k and v [B, H, T, E] from qkv [B, T, 3 D], with q and k rotated (see rotate) unless base is None.

    in_place: q and k may be rotated inside qkv, which must not be read afterwards, not even by a recomputation.
    Attention then saves one tensor for backward instead of qkv (for v), q and k. If qkv itself is saved already,
    backward raises torch's error about an in-place change.
    """
    b, t, d = *qkv.shape[:2], qkv.shape[2] // 3
    if qkv.dtype is torch.bfloat16 and use_kernels(qkv) and fits(d // heads, base):
        return _SplitHeads.apply(qkv, heads, base, in_place and direct(qkv) and readable(qkv))
    qk, v = qkv.view(b, t, 3 * heads, d // heads).split((2 * heads, heads), dim=2)
    qk = qk if base is None else rotate(qk, base)
    q, k = qk.transpose(1, 2).chunk(2, dim=1)
    return q, k, v.transpose(1, 2)


def rotate(x: Tensor, base: float) -> Tensor:
    """Return the rotary embedding (Su et al., arXiv 2104.09864) of x [B, T, H, E].

    The pair (2i, 2i + 1) turns by t * base^(-2i/E).
    """
    t, width = x.shape[1], x.shape[-1]
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * frequencies(width, base, x.device)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class _SplitHeads(torch.autograd.Function):
    """Saves nothing: backward needs only positions."""

    @staticmethod
    def forward(ctx, qkv: Tensor, heads: int, base: float | None, in_place: bool) -> Heads:
        ctx.base = base
        b, t, width = *qkv.shape[:2], qkv.shape[2] // (3 * heads)
        thirds = qkv.view(b, t, 3, heads, width)
        if base is None:
            q, k = thirds[:, :, 0], thirds[:, :, 1]
        elif in_place:
            rope_(qkv, heads, base, False)
            torch.autograd.graph.increment_version(qkv)
            q, k = thirds[:, :, 0], thirds[:, :, 1]
        else:
            q, k = rope(qkv, heads, base).unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), thirds[:, :, 2].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return join_heads(*gradients, ctx.base), None, None, None


def takes_joined(dpa: Any, qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> bool:
    """Return whether attend_joined() can replace splitting qkv and calling dpa, a DotProductAttention.

    It can if no hook observes dpa, dpa quantizes nothing, and cuDNN computes both passes.
    """
    if not direct(qkv) or qkv.dtype is not torch.bfloat16 or is_observed(dpa) or current().probe or not dpa.is_plain():
        return False
    if not (fits(qkv.shape[2] // (3 * heads), base) and readable(qkv)):
        return False
    return torch.are_deterministic_algorithms_enabled() and way_back(*heads_of(qkv, heads), is_causal) == CUDNN


def attend_joined(qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> Tensor:
    """Return attention [B, T, D] of qkv, bfloat16 [B, T, 3 D], which is overwritten.

    q and k are rotated in place (split_heads) unless base is None.
    """
    return AttendJoined.apply(qkv, heads, base, is_causal)


def heads_of(qkv: Tensor, heads: int) -> Heads:
    """q, k and v of a joined projection [B, T, 3 D], as views [B, H, T, E]."""
    return tuple(x.transpose(1, 2) for x in qkv.unflatten(2, (3, heads, -1)).unbind(2))


class AttendJoined(torch.autograd.Function):
    """Saves the projection as it was turned, the output, and the sums of its softmax."""

    @staticmethod
    def forward(ctx, qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> Tensor:
        ctx.heads, ctx.base, ctx.is_causal = heads, base, is_causal
        if base is not None:
            torch.autograd.graph.increment_version(qkv)
            rope_(qkv, heads, base, False)
        o, sums = cudnn_forward(*heads_of(qkv, heads), is_causal)
        ctx.save_for_backward(qkv, o, sums)
        return o.transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, o, sums = ctx.saved_tensors
        do = dy.unflatten(2, (ctx.heads, -1)).transpose(1, 2)
        gradient = attention_back(do, *heads_of(qkv, ctx.heads), o, sums, ctx.is_causal).view(qkv.shape)
        if ctx.base is not None:
            rope_(gradient, ctx.heads, ctx.base, True)
        return gradient, None, None, None
