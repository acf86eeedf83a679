"""Queries, keys and values out of one projection, the first two turned by their positions, and their gradients joined.

On a GPU each way is one pass (rope): v is never copied, and the gradients of q, k and v become that of the
projection without a concatenation. Elsewhere torch's operators compute it, which are the reference: they form the same
products and sums in float32, but may contract a product and a sum into one rounding, so that on a GPU an element can
differ in its last bit.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.nn.core.context import use_kernels
from hqsweep.ops.library import direct
from hqsweep.ops.model.rope import fits, frequencies, join_heads, readable, rope, rope_

Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v, [B, H, T, E] each."""


def split_heads(qkv: Tensor, heads: int, base: float | None, *, in_place: bool = False) -> Heads:
    """qkv [B, T, 3 D] -> q, k and v [B, H, T, E]: its thirds by heads, q and k turned (see rotate) unless base is None.

    in_place: q and k may be turned where they are, in qkv, which nobody then may read, not even to compute again:
    attention keeps one tensor for backward instead of qkv, for v, and of q and k. Where somebody saved qkv before,
    backward raises torch's error of a change in place.
    """
    b, t, d = *qkv.shape[:2], qkv.shape[2] // 3
    if qkv.dtype is torch.bfloat16 and use_kernels(qkv) and fits(d // heads, base):
        return _SplitHeads.apply(qkv, heads, base, in_place and direct(qkv) and readable(qkv))
    qk, v = qkv.view(b, t, 3 * heads, d // heads).split((2 * heads, heads), dim=2)
    qk = qk if base is None else rotate(qk, base)
    q, k = qk.transpose(1, 2).chunk(2, dim=1)
    return q, k, v.transpose(1, 2)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of x [B, T, H, E]: pair (2i, 2i + 1) turns by t * base^(-2i/E)."""
    t, width = x.shape[1], x.shape[-1]
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * frequencies(width, base, x.device)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class _SplitHeads(torch.autograd.Function):
    """Saves nothing: the way back needs the positions alone."""

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
