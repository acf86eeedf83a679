"""Attention of a joined qkv projection, rotated in place, as one autograd function.

Backward writes the gradient straight into the gradient of the projection and rotates it there. So no pass concatenates
the gradients of q, k and v.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.nn.attention.rope import Heads
from hqsweep.nn.attention.sdpa import CUDNN, cudnn_forward, repeats_in_parts, way_back
from hqsweep.nn.core.context import current
from hqsweep.nn.core.residual import is_observed
from hqsweep.nn.linear.linear import Linear
from hqsweep.ops.library import direct
from hqsweep.ops.model.attention import attention_back, attention_forward
from hqsweep.ops.model.rope import fits, readable, rope_
from hqsweep.parallel.overlap.chunked_input import Turns, is_hooked, part_in_turn


def takes_joined(dpa: Any, qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> bool:
    """Return whether attend_joined() can replace splitting qkv and calling dpa, a DotProductAttention.

    It can if no hook observes dpa, dpa quantizes nothing, and cuDNN computes both passes.
    """
    if not direct(qkv) or qkv.dtype is not torch.bfloat16 or is_observed(dpa) or current().probe or not dpa.is_plain():
        return False
    if not (fits(qkv.shape[2] // (3 * heads), base) and readable(qkv)):
        return False
    return torch.are_deterministic_algorithms_enabled() and way_back(*_heads(qkv, heads), is_causal) == CUDNN


def attend_joined(qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> Tensor:
    """Return attention [B, T, D] of qkv, bfloat16 [B, T, 3 D], which is overwritten: q and k are rotated in place.

    base: of the rotation (nn.attention.rope.split_heads); None: no rotation.
    """
    return _AttendJoined.apply(qkv, heads, base, is_causal, None)


def attend_in_turn(
    qkv: Tensor, heads: int, base: float | None, is_causal: bool, proj: Linear
) -> tuple[Tensor, Turns] | None:
    """Return attend_joined() for `proj`, its only reader, and the Turns in which proj requests it.

    The output is written for one rank's sequences at a time, for the ranks that share proj. None if the whole is
    computed at once.
    """
    exchange = None if proj.sum_left(qkv) is None else proj.exchange(qkv.shape[:2])
    part = part_in_turn(
        exchange, proj.active_quantizers().input, proj.gemm, qkv.detach().flatten(0, 1), qkv.shape[2] // 3
    )
    by_sequences = part is not None and proj.parallel.sequence == 0 and proj.dtype is qkv.dtype
    if not (by_sequences and not is_hooked() and repeats_in_parts(*_heads(qkv, heads), is_causal)):
        return None
    turns = Turns(part)
    return _AttendJoined.apply(qkv, heads, base, is_causal, turns), turns


def _heads(qkv: Tensor, heads: int) -> Heads:
    return tuple(x.transpose(1, 2) for x in qkv.unflatten(2, (3, heads, -1)).unbind(2))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Writer:
    """Writes attention's output and sums for the sequences of one rank at a time, of `world` ranks."""

    qkv: Tensor
    heads: int
    base: float | None
    is_causal: bool
    o: Tensor
    sums: Tensor
    world: int

    def __call__(self, rank: int) -> None:
        qkv, o, sums = (x.chunk(self.world)[rank] for x in (self.qkv, self.o, self.sums))
        if self.base is not None:
            rope_(qkv, self.heads, self.base, False)
        operands = *_heads(qkv, self.heads), self.is_causal
        if not attention_forward(*operands, o, sums):
            for place, values in zip((o, sums), cudnn_forward(*operands), strict=True):
                place.copy_(values)


class _AttendJoined(torch.autograd.Function):
    """Saves the rotated projection, the output, and the softmax's sums. With turns, they are written later."""

    @staticmethod
    def forward(ctx, qkv: Tensor, heads: int, base: float | None, is_causal: bool, turns: Turns | None) -> Tensor:
        ctx.heads, ctx.base, ctx.is_causal = heads, base, is_causal
        if base is not None:
            torch.autograd.graph.increment_version(qkv)
        if turns is None:
            if base is not None:
                rope_(qkv, heads, base, False)
            o, sums = cudnn_forward(*_heads(qkv, heads), is_causal)
        else:
            sequences, length, width = qkv.shape
            o = qkv.new_empty(sequences, length, heads, width // (3 * heads)).transpose(1, 2)
            sums = qkv.new_empty(sequences, heads, length, dtype=torch.float32)
            facts = {"heads": heads, "base": base, "is_causal": is_causal, "world": turns.part.group.size()}
            turns.write = _Writer(qkv=qkv, o=o, sums=sums, **facts)
        ctx.save_for_backward(qkv, o, sums)
        return o.transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, o, sums = ctx.saved_tensors
        do = dy.unflatten(2, (ctx.heads, -1)).transpose(1, 2)
        gradient = attention_back(do, *_heads(qkv, ctx.heads), o, sums, ctx.is_causal).view(qkv.shape)
        if ctx.base is not None:
            rope_(gradient, ctx.heads, ctx.base, True)
        return gradient, None, None, None, None
