"""Rows of tokens over the ranks of a group: gathers, sums whose rows are scattered, and sums that every rank keeps.

A token axis of `lead` sequences is split over W ranks: each rank has [lead * t, C] of the whole [lead * W * t, C],
namely the tokens [r * t, (r + 1) * t) of each sequence. Sums are added in float32 in the order of ranks, and rounded
once. sum_whole does so on GPUs only under torch.use_deterministic_algorithms; otherwise the backend adds.

hqsweep::sum_parts adds the ranks' partial results for the same tokens. A rank holds its own summand inside a matrix of
all tokens; the other summands were received. On CUDA one pass reads each summand once. torch's operators are the
reference.

A function begin_X starts X beside the work that follows; calling its result waits and gives the result of X. All ranks
begin the same collectives of a group in the same order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.ops.library import described, extension, has_kernels, operator, where
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.parallel.wire import collectives, memory, p2p_copy

WORD = 16
"""Bytes that the kernel loads at once."""


def _fake(parts: Tensor, received: Tensor, rank: int) -> Tensor:
    return parts.new_empty((parts.shape[0], parts.shape[2]))


@operator("sum_parts(Tensor parts, Tensor received, int rank) -> Tensor", fake=_fake, devices=("CUDA",))
def _sum_parts(parts: Tensor, received: Tensor, rank: int) -> Tensor:
    """Run sum_parts by the kernel; ValueError for inputs that `takes` refuses."""
    if not takes_parts(parts, received) or not 0 <= rank < parts.shape[1]:
        wanted = "[lead, W, n] and [W - 1, lead, n] of float32, bfloat16 or float16, contiguous, n in words of 16 bytes"
        got = f"parts are {described(parts)}, received {described(received)}, rank {rank}"
        raise ValueError(f"{got}; it takes {wanted}")
    total = parts.new_empty(parts.shape[0], parts.shape[2])
    _add(parts, received, rank, total)
    return total


def _add(parts: Tensor, received: Tensor, rank: int, total: Tensor) -> None:
    lead, ranks, count = parts.shape
    call = (parts.data_ptr(), received.data_ptr(), total.data_ptr(), DTYPES[parts.dtype], lead, ranks, count, rank)
    extension().sum_parts_cuda(*call, *where(parts))


def takes_parts(parts: Tensor, received: Tensor) -> bool:
    """Return whether the CUDA kernel takes these inputs."""
    lead, ranks, count = parts.shape
    same = parts.dtype == received.dtype and parts.device == received.device
    shaped = received.shape == (ranks - 1, lead, count) and parts.is_contiguous() and received.is_contiguous()
    whole = all(x.data_ptr() % WORD == 0 for x in (parts, received)) and count * parts.itemsize % WORD == 0
    return same and shaped and whole and parts.dtype in DTYPES


def sum_parts(parts: Tensor, received: Tensor, rank: int, out: Tensor | None = None) -> Tensor:
    """Return [lead, n]: all summands added in float32 in rank order, and rounded once to their dtype.

    parts [lead, W, n]: parts[:, rank] is this rank's summand. received [W - 1, lead, n]: the other ranks' summands, in
    rank order. out: contiguous, with the sum's shape and dtype; the sum is written to it.
    """
    compiling = torch.compiler.is_compiling()
    if parts.is_cuda and not compiling and has_kernels("cuda") and takes_parts(parts, received):
        if out is None:
            return _sum_parts(parts, received, rank)
        if out.data_ptr() % WORD == 0:
            _add(parts, received, rank, out)
            return out
    summands = [*received[:rank], parts[:, rank], *received[rank:]]
    total = summands[0].to(torch.float32, copy=True)
    for summand in summands[1:]:
        total += summand
    total = total.to(parts.dtype)
    return total if out is None else out.copy_(total)


Pending = Callable[[], Tensor]


class Summands(NamedTuple):
    """A sum over ranks of rows [t, C] that is not added yet. A kernel that reads the sum adds it up on the way."""

    own: Tensor
    """This rank's summand, in the shape of the sum."""
    arriving: Pending
    """Waits for the summands of the other ranks, in order of ranks.

    They are good until ranks of the group begin to exchange other rows, so read the sum at once and never keep it.
    """
    parts: Tensor
    """[1, W, n]: this rank's summands, for the rows of each rank; `own` is among them."""
    rank: int
    writer: Any = None
    """The hqsweep.nn.core.wire.GradientReader that takes the gradient of the sum, as soon as its reader knows it."""

    def of(self, own: Tensor) -> "Summands":
        """The same summands with `own` replaced by a tensor that autograd knows, in any shape of its rows."""
        return self._replace(own=own)

    def received(self) -> Tensor:
        """[W - 1, *own.shape]: the summands of the other ranks, after waiting for them."""
        return self.arriving().view(-1, *self.own.shape)

    def total(self) -> Tensor:
        """The sum."""
        received = self.received().flatten(1)[:, None]
        return sum_parts(self.parts, received, self.rank).view(self.own.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingSum:
    """The result of begin_sum_rows: calling it waits and adds."""

    parts: Tensor
    """[lead, W, n]: this rank's summands, for the rows of each rank."""
    shape: tuple[int, ...]
    """The shape of the sum."""
    rank: int
    arriving: Pending

    def __call__(self) -> Tensor:
        return sum_parts(self.parts, self._received(), self.rank).view(self.shape)

    def summands(self) -> Summands | None:
        """The summands, for a kernel that adds them up itself. None where no kernel can, such as for rows of several
        sequences, which are apart in memory."""
        if len(self.parts) > 1 or self.parts.dtype is not torch.bfloat16:
            return None
        own = self.parts[0, self.rank].view(self.shape)
        return Summands(own, self._received, self.parts, self.rank)

    def _received(self) -> Tensor:
        lead, world, count = self.parts.shape
        return self.arriving().view(self.parts.dtype).view(world - 1, lead, count)


def left_by(pending: Pending) -> Summands | None:
    """Return the summands of a started sum, for a reader that reads them at once; None if only the whole sum exists."""
    return pending.summands() if isinstance(pending, PendingSum) else None


def gather_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Tensor:
    """[lead * W * t, C]: the rows [lead * t, C] of all ranks, of any dtype whose bytes can be sent."""
    return begin_gather_rows(x, group, lead)()


def begin_gather_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """Start gather_rows; the returned function waits and gives its result."""
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
        return memory.in_order(whole.view(world, lead, x.numel() // lead).transpose(0, 1)).view(whole.shape)

    return result


def begin_lent_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """Start gather_rows without a copy of the result. It is good until the group's next exchange of rows."""
    world = group.size()
    x = x.contiguous()
    messages = {other: (x,) for other in range(world) if other != group.rank()}
    arriving = p2p_copy.begin(messages, group, own=(x,)) if lead == 1 else None
    if arriving is None:
        return begin_gather_rows(x, group, lead)
    return lambda: arriving().view(x.dtype).view(world * x.shape[0], *x.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class LentRows:
    """A begin_lent_rows(rows, group) whose rows [t, C] are yet to be written, to their final place."""

    rows: Tensor
    sending: p2p_copy.Sending

    def begun(self) -> Pending:
        """Start to send the rows, which are written now. See begin_lent_rows()."""
        for other in self.sending.others:
            self.sending.send(other, (self.rows,))
        return lambda: self.sending.received().view(self.rows.dtype).view(-1, *self.rows.shape[1:])


def start_lent_rows(
    shape: tuple[int, int], dtype: torch.dtype, group: ProcessGroup, device: torch.device
) -> LentRows | None:
    """LentRows of that shape and dtype; None, on all ranks, where no shared memory is free.

    The kernels that write the rows may read the last exchange.
    """
    sending = p2p_copy.start(math.prod(shape) * dtype.itemsize, group, device, has_own=True, reading=True)
    if sending is None:
        return None
    return LentRows(rows=sending.place(group.rank()).view(dtype).view(shape), sending=sending)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """The rows of all ranks in the memory where they arrive. They are good until release()."""

    received: Pending
    release: Callable[[], None]
    """Notes that the current stream has enqueued all reads of the rows."""


def begin_kept_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> KeptRows:
    """Start gather_rows(x, group, lead), without a copy of the result if copy engines carry it."""
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
    """[lead * t, C]: this rank's rows of the sum over ranks of x [lead * W * t, C]."""
    return begin_sum_rows(x, group, lead)()


def begin_sum_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Pending:
    """Start sum_rows; the returned PendingSum waits and adds.

    Meanwhile rows of x that belong to other ranks must not be written; this rank's own rows may be.
    """
    world, rank = group.size(), group.rank()
    if world == 1:
        return lambda: x
    x = x.contiguous()
    parts = x.view(lead, world, x.numel() // (lead * world))  # the tokens of each rank in each sequence
    others = [other for other in range(world) if other != rank]
    messages = {other: memory.in_order(parts[:, other]) for other in others}
    arriving = p2p_copy.begin({other: (message,) for other, message in messages.items()}, group)
    return _pending_sum(x, group, lead, arriving or _begin_all_to_all(messages, group))


def _pending_sum(x: Tensor, group: ProcessGroup, lead: int, arriving: Pending) -> PendingSum:
    world = group.size()
    parts, shape = x.view(lead, world, x.numel() // (lead * world)), (x.shape[0] // world, *x.shape[1:])
    return PendingSum(parts=parts, shape=shape, rank=group.rank(), arriving=arriving)


@dataclass(frozen=True, kw_only=True, eq=False)
class SumOfRows:
    """A begin_sum_rows(x, group) whose x [W * t, C] is still being written. Rows of other ranks leave when they are
    ready."""

    x: Tensor
    group: ProcessGroup
    sending: p2p_copy.Sending | None

    def ready(self, first: int, last: int) -> None:
        """Send the rows from first to before last, which belong to one other rank and follow its previous rows."""
        if self.sending is not None:
            other, row = divmod(first, len(self.x) // self.group.size())
            self.sending.send(other, (self.x[first:last],), row * self.x[0].nbytes)

    def begun(self) -> Pending:
        """The PendingSum. Call it when the rows of all other ranks are ready."""
        if self.sending is None:
            return begin_sum_rows(self.x, self.group)
        return _pending_sum(self.x, self.group, 1, self.sending.received)


def start_sum_rows(x: Tensor, group: ProcessGroup) -> SumOfRows:
    """The sum of a contiguous x that is yet to be written."""
    return SumOfRows(x=x, group=group, sending=p2p_copy.start(x.nbytes // group.size(), group, x.device))


def _begin_all_to_all(messages: Mapping[int, Tensor], group: ProcessGroup) -> Pending:
    """Start to exchange messages, by a collective; the result is the other ranks' messages to this rank, in order of
    ranks."""
    sent = torch.stack(list(messages.values())) if len(messages) > 1 else next(iter(messages.values()))[None]
    received, sizes = sent.new_empty(sent.shape), [int(rank in messages) for rank in range(group.size())]
    wait = collectives.begin(dist.all_to_all_single, received, sent, sizes, sizes, group=group)

    def result() -> Tensor:
        wait()
        return received

    return result


def sum_whole(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of x over all ranks, on each rank. x may be overwritten."""
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
