"""Room for the rows that come to experts over ranks, however many those are: only the device knows the numbers.

Each rank tells all others how many of its rows go to each expert, and works out on the device where every row stands at
its expert, and where it lay at its source. What leaves for a rank keeps its place in a message of as many rows as the
rank has in all, and only rows of that rank's experts are written. Nothing waits for the device, so that a CUDA graph
can be captured; the matrices of experts have as many rows as there is room for, and kernels leave out those that are
nobody's.

Rows that find no room would be lost. The results of all ranks are NaN then, and check() says why.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.dist import peers
from hqsweep.dist.collectives import all_gather
from hqsweep.errors import UserError
from hqsweep.memo import cached_property
from hqsweep.nn.context import current
from hqsweep.nn.router import Routing
from hqsweep.nn.token_route import Route, known_splits
from hqsweep.ops.padding import PaddedSplits
from hqsweep.ops.rows import copy_rows
from hqsweep.ops.splits import Splits

ROWS = peers.Purpose("expert rows", slots=2, most=1 << 31)


UNLIKE_TOKENS = "expert_room: the ranks' numbers of tokens differ, which takes null, for which the host waits"
OTHER_MICROBATCHES = "expert_room: the ranks' microbatches have other numbers than before; null takes any, and waits"


class ExpertRoom:
    """Room for `factor` times the rows that the experts of each rank get when all are chosen equally often. Over W
    ranks W times as many have room whatever is chosen."""

    def __init__(self, factor: float) -> None:
        if not factor >= 1:
            raise UserError(
                f"expert_room is {factor}; it takes 1 or more, times the rows of experts chosen equally often"
            )
        self.factor = factor
        self._seen: Tensor | None = None
        """float64 [3] on the device: the most room that was needed, and whether ranks had unlike numbers of rows, or
        other microbatches than before."""
        self._known: dict[tuple[int, int], int] = {}
        """Of the number of rows, and the microbatch, of this rank: the microbatch of the first rank of the group."""

    def route(self, tokens: Tensor, rows: int, multiple: int, groups: dict[str, Any]) -> Route:
        """Dispatcher.send_counts of as many rows on every rank."""
        group, number = groups["group"], current().microbatch
        ranks, rank, experts = group.size(), group.rank(), len(tokens) // group.size()
        told = torch.cat([tokens, tokens.new_full((1,), rows), tokens.new_full((1,), number)])
        all_told = told.new_empty(ranks * len(told))
        all_gather(all_told, told, group=group)
        all_told = all_told.view(ranks, -1)
        first = self._known.get((rows, number))
        if first is None:  # waits, the first time
            first = self._known[rows, number] = _first_microbatch(all_told, rows)
        room = math.ceil(min(ranks, self.factor) * rows)
        fits = self._note(all_told, rows, room, first)
        counts = all_told[:, :-2] * fits
        numbers = Numbers(counts=counts, rank=rank, rows=rows)
        base = _RoomySplits(rows=room, count=experts, sizes=None, device_sizes=numbers.arrived)
        if tokens.is_cuda:
            splits = PaddedSplits.over(base, multiple, tokens.device)
        else:
            splits = known_splits(-(-numbers.arrived // multiple) * multiple)
        local = Splits(rows=rows, count=len(tokens), sizes=None, device_sizes=tokens)
        return _RoomyRoute(
            **groups,
            first=rank * experts,
            local=local if tokens.is_cuda else known_splits(tokens),
            splits=splits,
            microbatch=first,
            numbers=numbers,
            offsets=splits.offsets(tokens.device),
            fits=fits,
            multiple=multiple,
        )

    def _note(self, told: Tensor, rows: int, room: int, first: int) -> Tensor:
        """Note what was needed; bool []: whether all ranks have room, and their numbers are as they should be."""
        ranks = len(told)
        arrived = told[:, :-2].view(ranks, ranks, -1).sum(dim=(0, 2)).max()
        unlike, other = (told[:, -2] != rows).any(), told[0, -1] != first
        needed = torch.stack([arrived / max(rows, 1), unlike, other]).double()
        if self._seen is None:
            self._seen = torch.zeros_like(needed)
        torch.maximum(self._seen, needed, out=self._seen)
        return ~((arrived > room) | unlike | other)

    def check(self, where: str = "") -> None:
        """UserError where since the last check rows found no room, or ranks did not go together; waits for the device.
        where: what stands before the name of the option."""
        if self._seen is None:
            return
        needed, unlike, other = self._seen.tolist()
        self._seen.zero_()
        if unlike or other:
            raise UserError(where + (OTHER_MICROBATCHES if other else UNLIKE_TOKENS))
        if needed > self.factor:
            raise UserError(
                f"{where}expert_room: {self.factor} left no room for the rows of a rank's experts, {needed:.4g} times"
                " those of experts that are chosen equally often; give more, or null, for which the host waits"
            )


def _first_microbatch(told: Tensor, rows: int) -> int:
    """The microbatch of the first rank; UserError where ranks have other numbers of rows. Waits for the device."""
    every = told[:, -2:].tolist()
    if any(number != rows for number, _ in every):
        raise UserError(UNLIKE_TOKENS)
    return every[0][1]


class _RoomySplits(Splits):
    """Splits of a matrix with rows behind the last member that are nobody's."""

    def _check(self, sizes: Sequence[int]) -> None:
        """The device has seen to them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """Where rows lie at their sources, as only the device knows."""

    counts: Tensor
    """int64 [W, E]: the rows of each rank for each expert."""
    rank: int
    rows: int
    """The rows of each rank."""

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def experts(self) -> int:
        """The experts of each rank."""
        return self.counts.shape[1] // self.ranks

    @property
    def first(self) -> int:
        return self.rank * self.experts

    @cached_property
    def ends(self) -> Tensor:
        """int64 [W, E]: where the rows of each expert end in those of a rank."""
        return self.counts.cumsum(dim=1)

    @cached_property
    def starts(self) -> Tensor:
        return self.ends - self.counts

    @cached_property
    def here(self) -> Tensor:
        """int64 [W, e]: how many rows of this rank's experts came from the ranks up to each."""
        return self.counts[:, self.first : self.first + self.experts].cumsum(dim=0)

    @cached_property
    def before(self) -> Tensor:
        """int64 [W, e]: how many came from the ranks before each."""
        return self.here - self.counts[:, self.first : self.first + self.experts]

    @cached_property
    def arrived(self) -> Tensor:
        """int64 [e]: the rows of this rank's experts."""
        return self.here[-1]

    @cached_property
    def expert_of(self) -> Tensor:
        """int64 [W, rows]: the expert of each row of a rank; E for those that no expert has."""
        return torch.searchsorted(self.ends, self.order.expand(self.ranks, -1).contiguous(), right=True)

    @cached_property
    def order(self) -> Tensor:
        return torch.arange(self.rows, device=self.counts.device)

    def among_others(self, ranks: Tensor) -> Tensor:
        """The numbers of ranks among those but this one."""
        return ranks - (ranks > self.rank).long()

    def leaving(self, other: int) -> Tensor:
        """int64 [rows]: the rows for the experts of a rank, each at its place; -1 for the others."""
        to = self.expert_of[self.rank] // self.experts
        return self.order.where(to == other, -1)

    def sources(self, offsets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each of `count` rows at this rank's experts, which begin at offsets int64 [e + 1]: the index of its row
        among this rank's own, among those that the other ranks have sent, [W - 1, rows], and among the rows that fill
        up; two of them are -1, or all for a row that no expert has."""
        place = torch.arange(count, device=offsets.device)
        expert = torch.bucketize(place, offsets[1:], right=True)
        some = expert < self.experts
        expert = expert.clamp(max=self.experts - 1)
        number = place - offsets[expert]
        source = (number[:, None] >= self.here.t()[expert]).sum(dim=1)
        real = some & (source < self.ranks)
        source = source.clamp(max=self.ranks - 1)
        row = self.starts[source, self.first + expert] + number - self.before[source, expert]
        own = real & (source == self.rank)
        sent = self.among_others(source) * self.rows + row
        return row.where(own, -1), sent.where(real & ~own, -1), expert.where(some & ~real, -1)

    def places(self, offsets: Tensor) -> Tensor:
        """int64 [W, rows]: the place at this rank's experts of each row of a rank; -1 for rows of other experts."""
        expert = self.expert_of - self.first
        mine = (expert >= 0) & (expert < self.experts)
        expert = expert.clamp(0, self.experts - 1)
        starts = self.starts[:, self.first : self.first + self.experts].gather(1, expert)
        return (offsets[expert] + self.before.gather(1, expert) + self.order - starts).where(mine, -1)

    def returning(self) -> Tensor:
        """int64 [rows]: among what the other ranks send back, [W - 1, rows], the rows that were sent to them; -1 for
        those that were not."""
        to = self.expert_of[self.rank] // self.experts
        away = (to != self.rank) & (to < self.ranks)
        return (self.among_others(to) * self.rows + self.order).where(away, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RoomyRoute(Route):
    """A route of numbers that only the device knows."""

    numbers: Numbers
    offsets: Tensor
    """int64 [e + 1]: where this rank's experts begin in what came."""
    fits: Tensor
    """bool []: whether all rows have room on all ranks."""
    multiple: int

    @property
    def fills_up(self) -> bool:
        return self.multiple > 1

    @cached_property
    def _leaving(self) -> dict[int, Tensor]:
        return {other: self.numbers.leaving(other) for other in self._others}

    @cached_property
    def _sources(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.numbers.sources(self.offsets, self.splits.rows)

    @cached_property
    def _places(self) -> Tensor:
        return self.numbers.places(self.offsets)

    @cached_property
    def _returning(self) -> Tensor:
        return self.numbers.returning()

    @property
    def _others(self) -> list[int]:
        return [other for other in range(self.numbers.ranks) if other != self.numbers.rank]

    def marked(self, routing: Routing) -> Routing:
        return replace(routing, weights=routing.weights * torch.where(self.fits, 1.0, torch.nan))

    def moved(self, rows: Tensor, fillers: Tensor) -> Tensor:
        rows = rows.contiguous()
        received = self._send(rows, lambda other, place: copy_rows(rows, self._leaving[other], place))
        own, sent, filling = self._sources
        out = rows.new_empty(self.splits.rows, rows.shape[1])
        copy_rows(rows, own, out)
        if self.fills_up:
            copy_rows(fillers, filling, out)
        copy_rows(received(), sent, out)
        return out

    def returned(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        received = self._send(rows, lambda other, place: copy_rows(rows, self._places[other], place))
        out = rows.new_empty(self.numbers.rows, rows.shape[1])
        copy_rows(rows, self._places[self.numbers.rank], out)
        copy_rows(received(), self._returning, out)
        return out

    def _send(self, like: Tensor, write: Callable[[int, Tensor], None]) -> Callable[[], Tensor]:
        """Have write(rank, place [rows, X]) write what goes to each other rank; the result waits for what they send:
        [(W - 1) * rows, X], of the others in their order."""
        count, group = self.numbers.rows, self.group
        sending = peers.start(count * like.shape[1] * like.itemsize, group, like.device, purpose=ROWS)
        if sending is None:
            return self._exchanged(like, write)
        for other in self._others:
            write(other, sending.place(other).view(like.dtype).view(count, -1))
        sending.written()
        return lambda: sending.received().view(like.dtype).view(-1, like.shape[1])

    def _exchanged(self, like: Tensor, write: Callable[[int, Tensor], None]) -> Callable[[], Tensor]:
        """_send() by a collective of equal splits."""
        count, others = self.numbers.rows, self._others
        leaving = like.new_empty(len(others), count, like.shape[1])
        for other, place in zip(others, leaving, strict=True):
            write(other, place)
        received = like.new_empty(len(others) * count, like.shape[1])
        splits = [count * (rank in others) for rank in range(self.numbers.ranks)]
        dist.all_to_all_single(received, leaving.view_as(received), splits, splits, group=self.group)
        return lambda: received
