"""Attention of a joined qkv projection, rotated in place, as one autograd function.

Backward writes the gradient straight into the gradient of the projection and rotates it there. So no pass concatenates
the gradients of q, k and v.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.nn.attention.rope import Heads
from hqsweep.nn.attention.sdpa import CUDNN, cudnn_forward, way_back
from hqsweep.nn.core.context import current
from hqsweep.nn.core.residual import is_observed
from hqsweep.ops.library import direct
from hqsweep.ops.model.attention import attention_back
from hqsweep.ops.model.rope import fits, readable, rope_


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
