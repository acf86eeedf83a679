"""Exchange of token rows between W ranks that share E experts, if only the device knows how many rows go where.

All ranks have equally many rows, sorted by expert, and hold e = E / W experts, in rank order. At an expert, rows are
sorted by rank, then by their order at that rank. On CUDA the kernels of csrc/expert_rows.h do all the work. Elsewhere
torch's operators do, which are the reference. Nothing waits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.library import extension, has_kernels, on_its_device, where

WORD = 16
"""Bytes that the kernels load at once; copied rows are whole words."""


def copy_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy rows[index[i]] to out[i]. A negative index leaves out[i] unchanged.

    rows [R, D], index int64 [N], out [N, D], all contiguous; rows and out have one dtype.
    """
    if 0 in (*rows.shape, *out.shape):
        return
    if rows.is_cuda and has_kernels("cuda") and _whole_words(rows) and _whole_words(out):
        _copy_by_kernel(rows, index, out)
    else:
        out.copy_(torch.where((index < 0)[:, None], out, rows.index_select(0, index.clamp(min=0))))


def _whole_words(x: Tensor) -> bool:
    return x.shape[1] * x.itemsize % WORD == 0 and x.data_ptr() % WORD == 0 and not x.is_neg()


@on_its_device
def _copy_by_kernel(rows: Tensor, index: Tensor, out: Tensor) -> None:
    addresses = (index.data_ptr(), rows.data_ptr(), out.data_ptr())
    extension().copy_rows_cuda(*addresses, len(out), out.shape[1] * out.itemsize, *where(rows))


class ExpertPlaces(NamedTuple):
    """Index tables for the exchange, int64; -1 for none."""

    own: Tensor
    """[places]: the row of this rank that goes to each place of its experts. A place has at most one of own, sent,
    filling."""
    sent: Tensor
    """[places]: the received row that goes to each place, as an index into [W - 1, rows]."""
    filling: Tensor
    """[places]: the expert that each padding place belongs to."""
    there: Tensor
    """[W, rows]: for each row of each rank, its place at this rank's experts."""
    leaving: Tensor
    """[W, rows]: this rank's rows that go to each rank's experts, as their own index."""
    returning: Tensor
    """[rows]: for each row of this rank that went to another rank, its index in the returned [W - 1, rows]."""


def expert_places(counts: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int) -> ExpertPlaces:
    """Return the index tables of one exchange.

    counts int64 [W, E]: rows of each rank for each expert. here int64 [W, e]: rows for this rank's experts, summed over
    the
    ranks up to each. offsets int64 [e + 1]: where these experts begin, possibly padded. places: the number of places.
    """
    ends = counts.cumsum(dim=1)
    if counts.is_cuda and has_kernels("cuda"):
        return _places_by_kernel(ends, here.contiguous(), offsets.contiguous(), rank, rows, places)
    return _places_by_torch(counts, ends, here, offsets, rank, rows, places)


@on_its_device
def _places_by_kernel(ends: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int) -> ExpertPlaces:
    ranks, experts = ends.shape
    shapes = ((places,), (places,), (places,), (ranks, rows), (ranks, rows), (rows,))
    results = ExpertPlaces(*(ends.new_empty(shape) for shape in shapes))
    tables = (ends.data_ptr(), here.data_ptr(), offsets.data_ptr())
    addresses = [result.data_ptr() for result in results]
    extension().expert_places_cuda(*tables, ranks, experts, rank, rows, places, addresses, *where(ends))
    return results


def _places_by_torch(
    counts: Tensor, ends: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int
) -> ExpertPlaces:
    ranks, held = here.shape
    first, order = rank * held, torch.arange(rows, device=counts.device)
    starts, before = ends - counts, here - counts[:, first : first + held]

    def among_others(other: Tensor) -> Tensor:
        return other - (other > rank).long()

    place = torch.arange(places, device=counts.device)
    expert = torch.bucketize(place, offsets[1:], right=True)
    some, expert = expert < held, expert.clamp(max=held - 1)
    number = place - offsets[expert]
    source = (number[:, None] >= here.t()[expert]).sum(dim=1)
    real, source = some & (source < ranks), source.clamp(max=ranks - 1)
    row = starts[source, first + expert] + number - before[source, expert]
    is_own = real & (source == rank)
    own = row.where(is_own, -1)
    sent = (among_others(source) * rows + row).where(real & ~is_own, -1)
    filling = expert.where(some & ~real, -1)

    expert_of = torch.searchsorted(ends, order.expand(ranks, -1).contiguous(), right=True)
    mine = (expert_of >= first) & (expert_of < first + held)
    expert = (expert_of - first).clamp(0, held - 1)
    begin = starts[:, first : first + held].gather(1, expert)
    there = (offsets[expert] + before.gather(1, expert) + order - begin).where(mine, -1)
    to = expert_of[rank] // held
    leaving = torch.stack([order.where(to == other, -1) for other in range(ranks)])
    returning = (among_others(to) * rows + order).where((to != rank) & (to < ranks), -1)
    return ExpertPlaces(own, sent, filling, there, leaving, returning)
