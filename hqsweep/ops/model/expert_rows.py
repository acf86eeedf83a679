"""Rows of tokens between W ranks that share out E experts, where only the device knows how many go where.

Every rank has as many rows, those of the first expert first, and holds e = E / W experts, in the order of ranks. At an
expert rows stand by rank, and those of a rank in its order. On CUDA all is done by the kernels of csrc/expert_rows.h,
elsewhere by torch's operators, which are the reference; nothing waits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.library import extension, has_kernels, on_its_device, where

WORD = 16
"""Bytes of one load of the kernels; rows that they copy are whole words."""


def copy_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy to each row of out [N, D] the one of rows [R, D] that index int64 [N] names; where the index is negative, it
    stays as it is. All are contiguous, rows and out of one dtype."""
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
    """Where rows stand, as indices int64; -1 where there is none."""

    own: Tensor
    """[places], of each place at this rank's experts: its row at this rank; of the next two as well, at most one of the
    three is there."""
    sent: Tensor
    """[places]: its row among those that the other ranks have sent, [W - 1, rows]."""
    filling: Tensor
    """[places]: the expert that it fills up."""
    there: Tensor
    """[W, rows]: the place at this rank's experts of each row of each rank."""
    leaving: Tensor
    """[W, rows]: the rows of this rank that are of each rank's experts, as their own index."""
    returning: Tensor
    """[rows]: of this rank's rows, those at other ranks, among what these send back, [W - 1, rows]."""


def expert_places(counts: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int) -> ExpertPlaces:
    """counts int64 [W, E]: the rows of each rank for each expert; here int64 [W, e]: those of this rank's experts, of
    all ranks up to each; offsets int64 [e + 1]: where these begin, filled up perhaps; places: how many there are."""
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
