"""Attention of a joined projection, which is turned where it is, as one function of autograd: backward writes the
gradient of the projection where it ends up, and turns it back there, so that no pass joins those of q, k and v."""

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
    """Whether attend_joined() computes what splitting qkv and calling dpa, a DotProductAttention, does: nobody observes
    dpa, it quantizes nothing, and cuDNN computes both ways."""
    if not direct(qkv) or qkv.dtype is not torch.bfloat16 or is_observed(dpa) or current().probe or not dpa.is_plain():
        return False
    if not (fits(qkv.shape[2] // (3 * heads), base) and readable(qkv)):
        return False
    return torch.are_deterministic_algorithms_enabled() and way_back(*_heads(qkv, heads), is_causal) == CUDNN


def attend_joined(qkv: Tensor, heads: int, base: float | None, is_causal: bool) -> Tensor:
    """Attention of qkv, bfloat16 [B, T, 3 D], which nobody may read afterwards -> [B, T, D]. q and k are turned where
    they are (nn.rope.split_heads) unless base is None."""
    return _AttendJoined.apply(qkv, heads, base, is_causal, None)


def attend_in_turn(
    qkv: Tensor, heads: int, base: float | None, is_causal: bool, proj: Linear
) -> tuple[Tensor, Turns] | None:
    """attend_joined() for `proj`, which alone reads the output: it is written by the sequences of each of the ranks
    that share proj, as proj asks for them. None where it is to be computed as a whole."""
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
    """Writes the output and the sums of attention, by the sequences of each of `world` ranks."""

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
    """Saves the projection as it was turned, the output, and the sums of its softmax. With turns they are written
    later."""

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
