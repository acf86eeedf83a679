"""A vocabulary over the ranks of a group: embedding tables and logits.

Rank r of W has the entries [r * v, (r + 1) * v) of W * v. Ranks exchange only three numbers for each row: its largest
logit, the sum of its exponentials, and the logit of its target (Shoeybi et al., arXiv 1909.08053).

On GPUs of one machine the kernels of all ranks run at the same time and exchange these numbers by mailboxes.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.nn.core.context import use_kernels
from hqsweep.nn.linear_loss import checked_targets, counted_rows
from hqsweep.nn.linear_loss import cross_entropy as whole_cross_entropy
from hqsweep.nn.linears import Linear
from hqsweep.nn.norm_embedding import check_tokens
from hqsweep.ops.vocabulary import (
    IGNORED,
    MOST_RANKS,
    NUMBERS,
    ROWS,
    Boxes,
    by_entry,
    embed,
    rows_of_rank,
    table_gradient,
    takes_table,
)
from hqsweep.parallel.wire import memory, p2p_copy
from hqsweep.parallel.wire.memory import all_say, shared_memory
from hqsweep.parallel.wire.tokens import begin_lent_rows, sum_rows, sum_whole


def vocabulary_group(head: Linear) -> ProcessGroup | None:
    """Return the ranks that share the vocabulary; None if this rank has all of it."""
    return None if head.parallel is None or head.parallel.mode != "column" else head.parallel.group


def cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the mean cross entropy of logits [..., V] with targets [...], float32 [].

    group: the ranks, each with V logits of the vocabulary, in their order. UserError as in checked_targets().
    """
    if group is None:
        return whole_cross_entropy(logits, targets)
    rows = logits.flatten(0, -2)
    targets = checked_targets(targets, len(rows), group.size() * rows.shape[1], rows.device, "cross_entropy")
    return split_cross_entropy(rows, targets, group)


def split_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Return the mean cross entropy of each rank's logits [M, v], float32 [], equal on all ranks.

    targets: checked int64 [M], entries of the whole vocabulary. The loss of a row is log(sum_v exp(x_v - max)) + max -
    x_target in float32. Sums are added in the order of ranks.
    """
    return _SplitCrossEntropy.apply(logits, targets, counted_rows(targets, group.size() * logits.shape[1]), group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Saves the softmax of this rank's logits in float32."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:
        x, first = logits.float(), group.rank() * logits.shape[1]
        largest = x.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        rows, own = torch.arange(len(x), device=x.device), targets - first
        here = (own >= 0) & (own < x.shape[1])
        own = own.where(here, 0)
        of_target = x[rows, own].where(here, 0.0)
        softmax = (x - largest[:, None]).exp_()
        total, of_target = sum_whole(torch.stack([softmax.sum(dim=1), of_target]), group)
        softmax /= total[:, None]
        counted = targets != IGNORED
        losses = (total.log() + largest - of_target).where(counted, 0.0)
        ctx.save_for_backward(softmax, own, here, counted, count)
        ctx.dtype = logits.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, own, here, counted, count = ctx.saved_tensors
        gradients = softmax.clone()
        rows = torch.arange(len(own), device=own.device)
        gradients[rows, own] -= here.float()
        gradients.mul_((gradient / count).where(counted, 0.0)[:, None])
        return gradients.to(ctx.dtype), None, None, None


def split_embedding(tokens: Tensor, table: Tensor, group: ProcessGroup, *, split: int | None) -> Tensor:
    """Return rows [B, T, D] of the whole table for tokens [B, T]. Each rank has [v, D] of the table.

    split: the axis of tokens along which the result has only this rank's part: T / W positions of each sequence, or B /
    W sequences.
    """
    return _SplitEmbedding.apply(tokens, table, group, split)


class _SplitEmbedding(torch.autograd.Function):
    """The embedding as an autograd function. Every row comes from one rank.

    If ranks write to each other's memory, and each has whole sequences, a rank sends only the rows that others lack.
    Otherwise rows are summed with zeros of the other ranks.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor, group: ProcessGroup, split: int | None) -> Tensor:
        shape = list(tokens.shape)
        if split is not None:
            check_tokens(shape, split, group.size())
            shape[split] //= group.size()
        ctx.group, ctx.split, ctx.entries = group, split is not None, len(table)
        ctx.lead = math.prod(shape[:split]) if ctx.split else 1
        shared = ctx.split and ctx.lead == 1 and group.size() > 1
        ctx.by_kernels = shared and use_kernels(table) and takes_table(table, tokens)
        tokens = tokens.reshape(-1)
        ctx.save_for_backward(tokens)
        sending = _start_rows(ctx, len(tokens) // group.size(), table) if ctx.by_kernels else None
        if sending is not None:
            return _received_rows(tokens, table, group, sending).view(*shape, table.shape[1])
        own, here = _own_entries(tokens, group, len(table))
        rows = F.embedding(own.where(here, 0), table)
        memory.as_words(rows)[0].masked_fill_(~here[:, None], 0)
        rows = sum_rows(rows, group, ctx.lead) if ctx.split else sum_whole(rows, group)
        return rows.view(*shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        sending = _start_rows(ctx, len(rows), rows) if ctx.by_kernels and rows.dtype in ROWS else None
        if sending is not None:
            return None, _table_gradient(rows.contiguous(), tokens, ctx.entries, ctx.group, sending), None, None
        rows = begin_lent_rows(rows, ctx.group, ctx.lead)() if ctx.split else rows  # which are read at once
        # An index that is left out, of a table with one entry more: torch has memory for as many different indices as
        # there are entries.
        elsewhere = ctx.entries
        own, here = _own_entries(tokens, ctx.group, ctx.entries)
        own = own.where(here, elsewhere)
        table = torch.ops.aten.embedding_dense_backward(rows, own, ctx.entries + 1, elsewhere, False)
        return None, table[:elsewhere], None, None


def _own_entries(tokens: Tensor, group: ProcessGroup, entries: int) -> tuple[Tensor, Tensor]:
    """Return the tokens as entries of this rank's part of a table, and a mask of the tokens in that part."""
    own = tokens - group.rank() * entries
    return own, (own >= 0) & (own < entries)


def _start_rows(ctx: Any, count: int, like: Tensor) -> p2p_copy.Sending | None:
    """Start an exchange of `count` rows of every rank, with the width and dtype of `like`."""
    return p2p_copy.start(count * like.shape[1] * like.itemsize, ctx.group, like.device)


def _received_rows(tokens: Tensor, table: Tensor, group: ProcessGroup, sending: p2p_copy.Sending) -> Tensor:
    """Return the rows of this rank's tokens. The other ranks send the rows of their entries."""
    of_rank, ranks = tokens.view(group.size(), -1), {"ranks": group.size(), "rank": group.rank()}
    for other in sending.others:
        embed(of_rank[other], table, out=sending.place(other), **ranks)
    sending.written()
    return embed(of_rank[group.rank()], table, received=sending.received(), **ranks)


def _table_gradient(
    rows: Tensor, tokens: Tensor, entries: int, group: ProcessGroup, sending: p2p_copy.Sending
) -> Tensor:
    """Return the gradient of this rank's part of the table, from the row gradients of all ranks' tokens."""
    own, stream = tokens.view(group.size(), -1)[group.rank()], torch.cuda.current_stream()
    beside = torch.cuda.Stream(priority=-1)  # whose small kernels get their places before the rest of a large one
    beside.wait_stream(stream)
    with torch.cuda.stream(beside):
        order, starts = by_entry(tokens, entries, group.rank())
    for other in sending.others:
        rows_of_rank(own, rows, entries, other, sending.place(other))
    sending.written()
    stream.wait_stream(beside)
    for tensor in (order, starts):
        tensor.record_stream(stream)
    ranks = {"ranks": group.size(), "rank": group.rank(), "received": sending.received()}
    return table_gradient(rows, tokens, order, starts, **ranks)


HALVES = 2
"""Launches alternate between the halves, since a rank may be one launch behind."""
PART_BYTES = 4 * NUMBERS

_MEETINGS: dict[tuple[str, int], Boxes | None] = {}
"""(name of a group, device) -> the boxes of the group; None if the ranks found that they cannot have any."""
_MEMORY: list[Any] = []
"""The memory of all boxes. Replaced boxes stay, since graphs may still use them."""


def meeting(group: ProcessGroup, device: torch.device, rows: int) -> Boxes | None:
    """Return the group's boxes for kernels of up to `rows` rows.

    None, on all ranks, on a CPU, over machines, and for more rows than before while a graph is captured. All ranks call
    it with the same arguments, and launch the same kernels in the same order.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or not 1 < group.size() <= MOST_RANKS:
        return None
    key = (group.group_name, device.index)
    found = _MEETINGS.get(key)
    if (found is None and key in _MEETINGS) or (found is not None and found.rows >= rows):
        return found
    if torch.cuda.is_current_stream_capturing():
        return None
    _MEETINGS[key] = _new(group, device, 1 << (rows - 1).bit_length())
    return _MEETINGS[key]


def _new(group: ProcessGroup, device: torch.device, rows: int) -> Boxes | None:
    if not all_say(torch.cuda.get_device_name(device), group, lambda names: len(set(names)) == 1):
        return None  # a kernel that one GPU cannot launch would be waited for
    size = HALVES * group.size() * rows * PART_BYTES
    memory = shared_memory(group, device, size)
    if memory is None:
        return None
    memory.get_buffer(group.rank(), (size,), torch.uint8).fill_(0xFF)  # no part has come
    state = torch.zeros(3, dtype=torch.uint32, device=device)
    memory.barrier()
    _MEMORY.append(memory)
    return Boxes(memory.buffer_ptrs_dev, state, rows, group.size(), group.rank())
