"""Attention over ranks that share its heads or the tokens of every sequence.

Attention can also be written by the sequences of each rank, when the next linear reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.nn.dot_product_attention import AttentionCall, DotProductAttention
from hqsweep.nn.linears import Linear
from hqsweep.nn.rope import AttendJoined, heads_of
from hqsweep.nn.sdpa import cudnn_forward, repeats_in_parts
from hqsweep.ops.attention import attention_forward, rope_
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared.call import PartCall
from hqsweep.parallel.shared.overlap import Turns, is_hooked, part_in_turn
from hqsweep.parallel.wire.tokens import gather_rows, sum_rows


@dataclass(frozen=True, kw_only=True)
class SharedAttentionCall(PartCall, AttentionCall):
    """A call of attention in which each rank has some heads, quantized with the scales of all heads."""

    group: ProcessGroup
    batch: int = 1
    """The number of sequences, each with the matrices of all heads."""

    def part_of(self, tensor: str, x: Tensor) -> Part | None:
        return Part(group=self.group, axis=0, runs=self.batch * (3 if tensor in ("qkv", "grad_input") else 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedAttention:
    """How ranks share a DotProductAttention (hqsweep.nn.core.wire.AttentionRanks)."""

    heads: ProcessGroup | None = None
    """The ranks that share the heads equally; None: this rank has all heads."""
    tokens: ProcessGroup | None = None
    """The ranks that share the tokens equally; None: this rank has all tokens."""

    def call(self, facts: Mapping[str, Any], batch: int) -> AttentionCall:
        if self.heads is None:
            return AttentionCall(**facts)
        return SharedAttentionCall(**facts, group=self.heads, batch=batch)

    def whole_sequences(self, qkv: Tensor) -> Tensor:
        return _WholeSequences.apply(qkv, self.tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        """Return attention of this rank's tokens of q. Every rank has q's tokens at the same place of its part."""
        length = q.shape[-2] // self.tokens.size()
        end = (self.tokens.rank() + 1) * length
        q = q[..., end - length : end, :]
        if not is_causal:
            return F.scaled_dot_product_attention(q, k, v)
        from torch.nn.attention.bias import causal_lower_right  # it imports torch._dynamo, which is slow

        k, v = k[..., :end, :], v[..., :end, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(length, end))

    def __deepcopy__(self, memo: Any) -> "SharedAttention":
        return self  # a group has no copies


def share_attention(dpa: DotProductAttention, **groups: ProcessGroup | None) -> None:
    """Share the heads, or the tokens, of a DotProductAttention over a group."""
    dpa.parallel = replace(dpa.parallel or SharedAttention(), **groups)


class _WholeSequences(torch.autograd.Function):
    """[B, t, C] of each of W ranks -> [B, W * t, C] on every rank; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.lead = group, len(x)
        return gather_rows(x.flatten(0, 1), group, ctx.lead).unflatten(0, (ctx.lead, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return sum_rows(dy.flatten(0, 1), ctx.group, ctx.lead).unflatten(0, (ctx.lead, -1)), None


def attend_in_turn(
    qkv: Tensor, heads: int, base: float | None, is_causal: bool, proj: Linear
) -> tuple[Tensor, Turns] | None:
    """Return attend_joined() for `proj`, the output's only reader, and the Turns that write it rank by rank.

    The ranks that share proj get their sequences when proj reads them. None if attention must be computed as a
    whole.
    """
    exchange, quantizer = proj.parallel.exchange(qkv.shape[:2]), proj.active_quantizers().input
    part = part_in_turn(exchange, quantizer, proj.gemm, qkv.detach().flatten(0, 1), qkv.shape[2] // 3)
    by_sequences = part is not None and proj.parallel.sequence == 0 and proj.dtype is qkv.dtype
    if not (by_sequences and not is_hooked() and repeats_in_parts(*heads_of(qkv, heads), is_causal)):
        return None
    turns = Turns(part)
    return _AttendInTurn.apply(qkv, heads, base, is_causal, turns), turns


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
        operands = *heads_of(qkv, self.heads), self.is_causal
        if not attention_forward(*operands, o, sums):
            for place, values in zip((o, sums), cudnn_forward(*operands), strict=True):
                place.copy_(values)


class _AttendInTurn(AttendJoined):
    """AttendJoined whose output and softmax sums are written later, by the sequences of each rank."""

    @staticmethod
    def forward(ctx, qkv: Tensor, heads: int, base: float | None, is_causal: bool, turns: Turns) -> Tensor:
        ctx.heads, ctx.base, ctx.is_causal = heads, base, is_causal
        if base is not None:
            torch.autograd.graph.increment_version(qkv)
        sequences, length, width = qkv.shape
        o = qkv.new_empty(sequences, length, heads, width // (3 * heads)).transpose(1, 2)
        sums = qkv.new_empty(sequences, heads, length, dtype=torch.float32)
        facts = {"heads": heads, "base": base, "is_causal": is_causal, "world": turns.part.group.size()}
        turns.write = _Writer(qkv=qkv, o=o, sums=sums, **facts)
        ctx.save_for_backward(qkv, o, sums)
        return o.transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *AttendJoined.backward(ctx, dy), None
