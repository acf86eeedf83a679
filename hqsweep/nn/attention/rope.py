"""Split a projection into queries, keys and values, rotate the first two by position, and join their gradients.

On a GPU each direction is one pass (ops.model.rope): v is never copied, and the gradients of q, k and v are joined
without a concatenation. torch's operators are the reference and serve other devices. They may fuse a product and a sum
into one rounding, so a GPU's result can differ in an element's last bit.
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
