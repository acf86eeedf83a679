"""Rows of an embedding table by token. W ranks can share the table: rank r has the entries [r * v, (r + 1) * v)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.nn.core.context import use_kernels
from hqsweep.ops.model.embedding import ROWS, by_entry, embed, embedding_gradient, rows_of_rank, table_gradient, takes
from hqsweep.parallel.wire import p2p_copy, wide_copy
from hqsweep.parallel.wire.tokens import begin_lent_rows, sum_rows, sum_whole


def check_tokens(shape: Sequence[int], axis: int, ranks: int, where: str = "") -> None:
    """Raise UserError for tokens [B, T] that ranks do not divide along an axis."""
    if shape[axis] % ranks:
        what = f"a sequence of {shape[1]} tokens" if axis else f"a batch of {shape[0]} sequences"
        raise UserError(f"{where}{what} does not divide by tp={ranks}")


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Return rows [..., D] of a table [V, D] for tokens int64 [...]. On CUDA, own kernels compute the table's
    gradient."""
    if not (use_kernels(table) and takes(table, tokens)):
        return F.embedding(tokens, table)
    return _Embedding.apply(tokens, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.entries = len(table)
        if torch.compiler.is_compiling():
            return F.embedding(tokens, table)
        return embed(tokens.reshape(-1), table).view(*tokens.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_gradient(gradient.flatten(0, -2), tokens.reshape(-1), ctx.entries)


def split_embedding(tokens: Tensor, table: Tensor, group: ProcessGroup, *, split: int | None) -> Tensor:
    """Return rows [B, T, D] of the whole table for tokens [B, T]; each rank holds [v, D] of the table.

    split: the axis of tokens along which the result is cut, so that this rank gets its part only: T / W positions of
    each sequence, or B / W sequences. None: every rank gets all rows.
    """
    return _SplitEmbedding.apply(tokens, table, group, split)


class _SplitEmbedding(torch.autograd.Function):
    """split_embedding() as an autograd function. Every row comes from one rank.

    If ranks can write to each other's memory, and each has whole sequences, a rank sends only the rows that others
    lack.
    Otherwise rows are summed over ranks, with zeros from the ranks that lack them.
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
        ctx.by_kernels = shared and use_kernels(table) and takes(table, tokens)
        tokens = tokens.reshape(-1)
        ctx.save_for_backward(tokens)
        sending = _start_rows(ctx, len(tokens) // group.size(), table) if ctx.by_kernels else None
        if sending is not None:
            return _received_rows(tokens, table, group, sending).view(*shape, table.shape[1])
        own, here = _own_entries(tokens, group, len(table))
        rows = F.embedding(own.where(here, 0), table)
        wide_copy.as_words(rows)[0].masked_fill_(~here[:, None], 0)
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
    """Return the tokens' entries in this rank's part of a table, and a mask of the tokens that are in it."""
    own = tokens - group.rank() * entries
    return own, (own >= 0) & (own < entries)


def _start_rows(ctx: Any, count: int, like: Tensor) -> p2p_copy.Sending | None:
    """Start an exchange of `count` rows per rank, with the width and dtype of `like`. None if peers' memory is
    unavailable."""
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
