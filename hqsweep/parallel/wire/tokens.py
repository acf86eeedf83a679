"""Rows of tokens over the ranks of a group: gathered, summed, and summed where each rank keeps its own.

A token axis of `lead` sequences lies split over ranks: a rank has [lead * t, C] of a whole [lead * W * t, C], tokens
[r * t, (r + 1) * t) of each sequence. Sums are of the values as they arrive, added in float32 in the order of ranks and
rounded once; of sum_whole on GPUs under torch.use_deterministic_algorithms alone, otherwise the backend adds.

What `begin_` starts goes on beside the work that follows; calling what it returns waits, and gives the result. All
ranks begin the same collectives of a group in the same order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.ops.sum_parts import sum_parts
from hqsweep.parallel.wire import collectives, p2p_copy, wide_copy

Pending = Callable[[], Tensor]


class Summands(NamedTuple):
    """A sum over ranks of rows [t, C] that is left to whoever reads it, in one pass with what it does."""

    own: Tensor
    """What this rank has computed of the rows, in the shape of the sum."""
    arriving: Pending
    """What the other ranks have, in their order. It is good until ranks of the group begin to exchange other rows, so
    the sum is read at once, and never kept."""
    parts: Tensor
    """[1, W, n]: what this rank has computed of the rows of each, among them `own`."""
    rank: int
    writer: Any = None
    """The hqsweep.nn.core.wire.GradientReader that takes the gradient of the sum, as soon as its reader knows it."""

    def of(self, own: Tensor) -> "Summands":
        """The same with `own` as autograd knows it, in any shape of its rows."""
        return self._replace(own=own)

    def received(self) -> Tensor:
        """[W - 1, *own.shape]: what the other ranks have, once it has come."""
        return self.arriving().view(-1, *self.own.shape)

    def total(self) -> Tensor:
        """The sum."""
        received = self.received().flatten(1)[:, None]
        return sum_parts(self.parts, received, self.rank).view(self.own.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingSum:
    """The sum of begin_sum_rows."""

    parts: Tensor
    """[lead, W, n]: what this rank has computed of the rows of each."""
    shape: tuple[int, ...]
    """The shape of the sum."""
    rank: int
    arriving: Pending

    def __call__(self) -> Tensor:
        return sum_parts(self.parts, self._received(), self.rank).view(self.shape)

    def summands(self) -> Summands | None:
        """What is to be added; None for what a norm's kernel does not read so, such as rows of several sequences, which
        lie apart."""
        if len(self.parts) > 1 or self.parts.dtype is not torch.bfloat16:
            return None
        own = self.parts[0, self.rank].view(self.shape)
        return Summands(own, self._received, self.parts, self.rank)

    def _received(self) -> Tensor:
        lead, world, count = self.parts.shape
        return self.arriving().view(self.parts.dtype).view(world - 1, lead, count)


def left_by(pending: Pending) -> Summands | None:
    """The summands of a sum that was begun, for who reads them at once; None where it is to be asked for as a whole."""
    return pending.summands() if isinstance(pending, PendingSum) else None


def gather_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Tensor:
    """[lead * t, C] of each rank -> the whole [lead * W * t, C], of any dtype whose bytes travel."""
    return begin_gather_rows(x, group, lead)()


def begin_gather_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """gather_rows, begun."""
    world = group.size()
    if world == 1:
        return lambda: x
    x = x.contiguous()
    whole = x.new_empty(world * x.shape[0], *x.shape[1:])
    wait = collectives.begin(collectives.all_gather, whole, x, group=group)

    def result() -> Tensor:
        wait()
        if lead == 1:
            return whole
        return wide_copy.in_order(whole.view(world, lead, x.numel() // lead).transpose(0, 1)).view(whole.shape)

    return result


def begin_lent_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """begin_gather_rows(x, group, lead), whose result is good until ranks of the group begin to exchange other rows."""
    world = group.size()
    x = x.contiguous()
    messages = {other: (x,) for other in range(world) if other != group.rank()}
    arriving = p2p_copy.begin(messages, group, own=(x,)) if lead == 1 else None
    if arriving is None:
        return begin_gather_rows(x, group, lead)
    return lambda: arriving().view(x.dtype).view(world * x.shape[0], *x.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class LentRows:
    """begin_lent_rows(rows, group) of rows [t, C] that are about to be written: to their place among those of all
    ranks."""

    rows: Tensor
    sending: p2p_copy.Sending

    def begun(self) -> Pending:
        """begin_lent_rows(), when the rows are written."""
        for other in self.sending.others:
            self.sending.send(other, (self.rows,))
        return lambda: self.sending.received().view(self.rows.dtype).view(-1, *self.rows.shape[1:])


def start_lent_rows(
    shape: tuple[int, int], dtype: torch.dtype, group: ProcessGroup, device: torch.device
) -> LentRows | None:
    """Rows of that shape and dtype, to be written by what reads what came last; None, on all ranks, where no memory
    waits for them."""
    sending = p2p_copy.start(math.prod(shape) * dtype.itemsize, group, device, has_own=True, reading=True)
    if sending is None:
        return None
    return LentRows(rows=sending.place(group.rank()).view(dtype).view(shape), sending=sending)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """The rows of all ranks, where they have arrived: good until release()."""

    received: Pending
    release: Callable[[], None]
    """Says that the current stream has got all reads of them."""


def begin_kept_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> KeptRows:
    """begin_gather_rows(x, group, lead), copied nowhere if copy engines carry it."""
    x = x.contiguous()
    sending = p2p_copy.start(x.nbytes, group, x.device, has_own=True) if lead == 1 else None
    if sending is None:
        return KeptRows(received=begin_gather_rows(x, group, lead), release=lambda: None)
    sending.keep()
    own = sending.place(group.rank()).view(x.dtype).view(x.shape)
    p2p_copy.owe(group, x.device, lambda: own.copy_(x))
    lent = LentRows(rows=x, sending=sending)
    return KeptRows(received=lent.begun(), release=sending.release)


def sum_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Tensor:
    """[lead * W * t, C] of each rank -> this rank's rows [lead * t, C] of their sum."""
    return begin_sum_rows(x, group, lead)()


def begin_sum_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """sum_rows, begun. Meanwhile nothing writes rows of x that are other ranks', and this rank's may be written."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return lambda: x
    x = x.contiguous()
    parts = x.view(lead, world, x.numel() // (lead * world))  # tokens of each rank, in each sequence
    others = [other for other in range(world) if other != rank]
    messages = {other: wide_copy.in_order(parts[:, other]) for other in others}
    arriving = p2p_copy.begin({other: (message,) for other, message in messages.items()}, group)
    return _pending_sum(x, group, lead, arriving or _begin_all_to_all(messages, group))


def _pending_sum(x: Tensor, group: ProcessGroup, lead: int, arriving: Pending) -> PendingSum:
    world = group.size()
    parts, shape = x.view(lead, world, x.numel() // (lead * world)), (x.shape[0] // world, *x.shape[1:])
    return PendingSum(parts=parts, shape=shape, rank=group.rank(), arriving=arriving)


@dataclass(frozen=True, kw_only=True, eq=False)
class SumOfRows:
    """begin_sum_rows(x, group) of an x [W * t, C] whose rows are still being written: those of other ranks leave when
    they are ready."""

    x: Tensor
    group: ProcessGroup
    sending: p2p_copy.Sending | None

    def ready(self, first: int, last: int) -> None:
        """Send these rows, of one other rank, which follow those that it was sent before."""
        if self.sending is not None:
            other, row = divmod(first, len(self.x) // self.group.size())
            self.sending.send(other, (self.x[first:last],), row * self.x[0].nbytes)

    def begun(self) -> Pending:
        """begin_sum_rows(), when the rows of all other ranks are ready."""
        if self.sending is None:
            return begin_sum_rows(self.x, self.group)
        return _pending_sum(self.x, self.group, 1, self.sending.received)


def start_sum_rows(x: Tensor, group: ProcessGroup) -> SumOfRows:
    """The sum of an x that is contiguous, and about to be written."""
    return SumOfRows(x=x, group=group, sending=p2p_copy.start(x.nbytes // group.size(), group, x.device))


def _begin_all_to_all(messages: Mapping[int, Tensor], group: ProcessGroup) -> Pending:
    """The messages of the other ranks to this one, in their order, by a collective."""
    sent = torch.stack(list(messages.values())) if len(messages) > 1 else next(iter(messages.values()))[None]
    received, sizes = sent.new_empty(sent.shape), [int(rank in messages) for rank in range(group.size())]
    wait = collectives.begin(dist.all_to_all_single, received, sent, sizes, sizes, group=group)

    def result() -> Tensor:
        wait()
        return received

    return result


def sum_whole(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the x of all ranks, on each; x may be written."""
    world = group.size()
    if world == 1:
        return x
    if x.is_cuda and not torch.are_deterministic_algorithms_enabled():
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x
    if x.dim() > 1 and x.shape[0] % world == 0:
        return gather_rows(sum_rows(x, group), group)
    parts = x.new_empty(world, *x.shape)
    collectives.all_gather(parts, x.contiguous()[None], group=group)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)
