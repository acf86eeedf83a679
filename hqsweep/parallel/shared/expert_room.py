"""Room for rows from all ranks at their experts, while only the device knows how many rows come.

Each rank sends all others the number of its rows for each expert. The device then computes the place of every row at
its expert, and at its source. A message to a rank has room for all rows of the sender; only the rows of that rank's
experts are written. The host never waits for the device, so that a CUDA graph can be captured. The matrices of experts
have as many rows as there is room, and kernels skip unused rows.

Rows without room would be lost. The results of all ranks are NaN then, and check() says why.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.core.context import current
from hqsweep.nn.router import Routing
from hqsweep.ops.experts import ExpertPlaces, copy_rows, expert_places
from hqsweep.ops.splits import PaddedSplits, Splits
from hqsweep.parallel.shared.token_route import Route, known_splits
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.collectives import all_gather

ROWS = p2p_copy.Purpose("expert rows", slots=2, most=1 << 31)
UNLIKE_TOKENS = "expert_room: the ranks' numbers of tokens differ, which takes null, for which the host waits"
OTHER_MICROBATCHES = "expert_room: the ranks' microbatches have other numbers than before; null takes any, and waits"


class ExpertRoom:
    """Room for `factor` times the rows of each rank's experts under equal choices.

    Over W ranks, factor W has room for any choices.
    """

    def __init__(self, factor: float) -> None:
        if not factor >= 1:
            raise UserError(f"expert_room is {factor}; it takes 1, for experts that are chosen equally often, or more")
        self.factor = factor
        self._seen: Tensor | None = None
        """float64 [3] on the device: the first room that was too small, and whether ranks had unlike numbers of rows,
        or other microbatches than before."""
        self._known: dict[tuple[int, int], int] = {}
        """(number of rows, microbatch) of this rank -> the microbatch of the group's first rank."""

    def route(self, tokens: Tensor, rows: int, multiple: int, groups: dict[str, Any]) -> Route:
        """Return Dispatcher.send_counts() for equally many rows on every rank."""
        group, number = groups["group"], current().microbatch
        ranks, rank, experts = group.size(), group.rank(), len(tokens) // group.size()
        all_told = _all_told(tokens, rows, number, group)
        first = self._known.get((rows, number))
        if first is None:  # waits, the first time
            first = self._known[rows, number] = _first_microbatch(all_told, rows)
        room = math.ceil(min(ranks, self.factor) * rows)
        fits = self._note(all_told, rows, room, first)
        counts = all_told[:, :-2] * fits
        here = counts[:, rank * experts : (rank + 1) * experts].cumsum(dim=0)
        base = _RoomySplits(rows=room, count=experts, sizes=None, device_sizes=here[-1])
        if tokens.is_cuda:
            splits = PaddedSplits.over(base, multiple, tokens.device)
            local = Splits(rows=rows, count=len(tokens), sizes=None, device_sizes=tokens)
        else:
            splits, local = known_splits(-(-here[-1] // multiple) * multiple), known_splits(tokens)
        places = expert_places(counts, here, splits.offsets(tokens.device), rank, rows, splits.rows)
        return _RoomyRoute(
            **groups,
            first=rank * experts,
            local=local,
            splits=splits,
            microbatch=first,
            places=places,
            rows=rows,
            fits=fits,
            multiple=multiple,
        )

    def _note(self, told: Tensor, rows: int, room: int, first: int) -> Tensor:
        """Note the room that the rows need. Returns bool []: whether all ranks have room, and their numbers agree."""
        ranks = len(told)
        arrived = told[:, :-2].view(ranks, ranks, -1).sum(dim=(0, 2)).max()
        unlike, other = (told[:, -2] != rows).any(), told[0, -1] != first
        needed = torch.stack([arrived / max(rows, 1) * (arrived > room), unlike, other]).double()
        if self._seen is None:
            self._seen = torch.zeros_like(needed)
        self._seen.copy_(self._seen.where(self._seen.any(), needed))  # the first: later routings may be of NaN
        return ~((arrived > room) | unlike | other)

    def check(self, where: str = "") -> None:
        """Raise UserError if rows lacked room since the last check, or ranks disagreed. Waits for the device.

        where: text before the name of the option.
        """
        if self._seen is None:
            return
        needed, unlike, other = self._seen.tolist()
        self._seen.zero_()
        if unlike or other:
            raise UserError(where + (OTHER_MICROBATCHES if other else UNLIKE_TOKENS))
        if needed:
            raise UserError(
                f"{where}expert_room: {self.factor} left no room for the rows of a rank's experts, {needed:.4g} times"
                " those of experts that are chosen equally often; give more, or null, for which the host waits"
            )


def check_room(model: nn.Module, where: str = "") -> None:
    """Raise UserError if rows of the model's experts lacked room since the last check, or ranks had unlike numbers of
    tokens.

    The results were NaN then. Waits for the device. where: text before the name of the option.
    """
    dispatchers = [getattr(module, "dispatcher", None) for module in model.modules()]
    for room in dict.fromkeys(dispatcher.room for dispatcher in dispatchers if dispatcher is not None):
        if room is not None:
            room.check(where)


def _all_told(tokens: Tensor, rows: int, microbatch: int, group: dist.ProcessGroup) -> Tensor:
    """Return int64 [W, E + 2]: of each rank its rows for each expert, its number of rows, and its microbatch."""
    told = torch.cat([tokens, tokens.new_full((1,), rows), tokens.new_full((1,), microbatch)])
    all_told = told.new_empty(group.size() * len(told))
    all_gather(all_told, told, group=group)
    return all_told.view(group.size(), -1)


def _first_microbatch(told: Tensor, rows: int) -> int:
    """Return the microbatch of the first rank. UserError if ranks differ in their numbers of rows. Waits for the
    device."""
    every = told[:, -2:].tolist()
    if any(number != rows for number, _ in every):
        raise UserError(UNLIKE_TOKENS)
    return every[0][1]


class _RoomySplits(Splits):
    """Splits of a matrix with unused rows after the last member."""

    def _check(self, sizes: Sequence[int]) -> None:
        """Do nothing: the device has checked the sizes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _RoomyRoute(Route):
    """A route whose numbers of rows only the device knows."""

    places: ExpertPlaces
    rows: int
    """The rows of each rank."""
    fits: Tensor
    """bool []: whether all rows have room on all ranks."""
    multiple: int
    """Experts are padded to a multiple of this."""

    @property
    def fills_up(self) -> bool:
        return self.multiple > 1

    @property
    def end(self) -> Tensor | None:
        return self.splits.offsets(self.fits.device)[-1:] if self.fits.is_cuda else None

    @property
    def _others(self) -> list[int]:
        return [other for other in range(self.group.size()) if other != self.group.rank()]

    def marked(self, routing: Routing) -> Routing:
        return replace(routing, weights=routing.weights * torch.where(self.fits, 1.0, torch.nan))

    def moved(self, rows: Tensor, fillers: Tensor) -> Tensor:
        rows, places = rows.contiguous(), self.places
        received = self._send(rows, lambda other, place: copy_rows(rows, places.leaving[other], place))
        out = rows.new_empty(self.splits.rows, rows.shape[1])
        copy_rows(rows, places.own, out)
        if self.fills_up:
            copy_rows(fillers, places.filling, out)
        copy_rows(received(), places.sent, out)
        return out

    def returned(self, rows: Tensor) -> Tensor:
        rows, places = rows.contiguous(), self.places
        received = self._send(rows, lambda other, place: copy_rows(rows, places.there[other], place))
        out = rows.new_empty(self.rows, rows.shape[1])
        copy_rows(rows, places.there[self.group.rank()], out)
        copy_rows(received(), places.returning, out)
        return out

    def _send(self, like: Tensor, write: Callable[[int, Tensor], None]) -> Callable[[], Tensor]:
        """Let write(rank, place [rows, X]) write the message for each other rank, and send it.

        The returned function waits for their messages, [(W - 1) * rows, X], in order of ranks.
        """
        count, group = self.rows, self.group
        sending = p2p_copy.start(count * like.shape[1] * like.itemsize, group, like.device, purpose=ROWS)
        if sending is None:
            return self._exchanged(like, write)
        for other in self._others:
            write(other, sending.place(other).view(like.dtype).view(count, -1))
        sending.written()
        return lambda: sending.received().view(like.dtype).view(-1, like.shape[1])

    def _exchanged(self, like: Tensor, write: Callable[[int, Tensor], None]) -> Callable[[], Tensor]:
        """Return _send() by a collective with equal splits."""
        count, others = self.rows, self._others
        leaving = like.new_empty(len(others), count, like.shape[1])
        for other, place in zip(others, leaving, strict=True):
            write(other, place)
        received = like.new_empty(len(others) * count, like.shape[1])
        splits = [count * (rank in others) for rank in range(self.group.size())]
        dist.all_to_all_single(received, leaving.view_as(received), splits, splits, group=self.group)
        return lambda: received
