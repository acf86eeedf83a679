"""Messages between the GPUs of one machine, written by copy engines into memory that their ranks share.

A collective of NCCL runs on multiprocessors. Beside a GEMM that fills them all it starts late, or takes some of them
for as long as it waits, and the GEMM with its waves of tiles takes up to half longer. A copy engine takes none (16384 x
2752 times 2752 x 2048 by halves on an H100, and a sum of 34 MB: 278 us alone, 317 with copies beside it, 427 with
NCCL). The memory and its signals are torch's (torch.distributed._symmetric_memory); this module says when a part of it
is free.

A mailbox has slots, each for one exchange: every rank writes to all others; a rank that wants what has come signals
that its own messages are written, and waits for the others' signals. What has come is good until the next exchange
begins. So whoever begins an exchange has enqueued the reads of those before, but for the ones that have not been waited
for; and whoever has waited for an exchange knows that the others had begun it. From that follows which slots are free,
with no message about it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.parallel.wire.shared_memory import shared_memory


@dataclass(eq=False)
class Exchange:
    slot: int
    begun: int
    """The number of exchanges that had begun before."""
    waited: bool = False
    """Whether this rank has waited for it, and so knows that the others had begun it."""
    read: int | None = None
    """The number of exchanges that had begun when all its reads were enqueued."""
    kept: bool = False
    """Whether it will be read after others have begun."""


class Slots:
    """Which slots are free, from the order in which exchanges begin and are waited for, which all ranks have alike."""

    def __init__(self, count: int) -> None:
        self.last: list[Exchange | None] = [None] * count
        self.recent: deque[Exchange] = deque(maxlen=2 * count)
        self.begun = 0

    def take(self) -> Exchange | None:
        """A new exchange in a free slot; None where none is known to be free. Ranks signal that its messages have come
        behind all reads of those that were waited for before."""
        for each in self.last:
            if each is not None and each.waited and each.read is None and not each.kept:
                each.read = self.begun
        slot = next((slot for slot, last in enumerate(self.last) if last is None or self._is_free(last)), None)
        if slot is None:
            return None
        exchange = Exchange(slot, self.begun)
        self.last[slot] = exchange
        self.recent.append(exchange)
        self.begun += 1
        return exchange

    def _is_free(self, last: Exchange) -> bool:
        """Whether the others have enqueued their reads of it before they began one that this rank has waited for."""
        read = last.read
        return read is not None and any(each.waited and each.begun >= read for each in self.recent)

    def settle(self, reading: Exchange | None = None) -> None:
        """Note that the others have done all that they had enqueued, as a barrier shows; not yet the reads of exchanges
        that are kept, and, if there is such a one, of another that was waited for."""

        def stays(last: Exchange) -> bool:
            return not last.waited or last.kept or last is reading

        self.last = [last if last is not None and stays(last) else None for last in self.last]

    def clear(self) -> None:
        """Forget exchanges that nobody will wait for, as those of a capture that failed, too."""
        self.last = [None] * len(self.last)
        self.recent.clear()


LEAST_BYTES = 1 << 20
"""Bytes of a message from which it is written by a copy engine; NCCL is as fast for fewer."""


class Purpose(NamedTuple):
    """What a mailbox is for: the exchanges of each purpose have their own, and are in an order of their own."""

    name: str
    slots: int
    """The number of slots: two for each exchange that is on its way at a time."""
    most: int
    """Bytes of a slot, at most."""


ROWS = Purpose("rows", slots=4, most=1 << 28)
WORD = 16

Message = Sequence[Tensor]
"""Contiguous tensors, whose bytes are sent one after the other."""
Received = Callable[[], Tensor]


def begin(
    messages: Mapping[int, Message],
    group: ProcessGroup,
    *,
    own: Message = (),
    purpose: Purpose = ROWS,
    early: bool = False,
) -> Received | None:
    """Send each other rank of the group its message, of the same tensors' sizes on all ranks. None, on all ranks, where
    no mailbox can take them: the caller then takes a collective.

    The result waits for what the others have sent to this rank: uint8 [W, bytes], with the message `own` in this rank's
    place; without it [W - 1, bytes], of the others in their order. It is good until the next begin() of this group and
    purpose. Nothing writes to the messages before the result has been asked for. early: they were there when the group
    last called all_read(), so that they may leave then, beside all that the stream has got since.
    """
    pieces = next(iter(messages.values()), ())
    if not pieces or any(piece.nbytes % WORD for piece in pieces):
        return None
    size = sum(piece.nbytes for piece in pieces)
    sending = start(size, group, pieces[0].device, has_own=bool(own), purpose=purpose, early=early)
    if sending is None:
        return None
    if own:
        owe(group, pieces[0].device, partial(_copy, sending.place(group.rank()), own), purpose)
    for other, message in messages.items():
        sending.send(other, message)
    return sending.received


def start(
    size: int,
    group: ProcessGroup,
    device: torch.device,
    *,
    has_own: bool = False,
    purpose: Purpose = ROWS,
    early: bool = False,
    reading: bool = False,
) -> "Sending | None":
    """begin() of messages of `size` bytes that leave piece by piece, from a device; of all ranks at the same place.
    reading: what came last is still to be read, by what writes the messages."""
    if device.type != "cuda" or torch.compiler.is_compiling() or "nccl" not in dist.get_backend(group):
        return None
    received = size * (group.size() - (not has_own))
    if size < LEAST_BYTES or size % WORD or received > purpose.most:
        return None
    mailbox = _mailbox(group, device, purpose, received)
    return None if mailbox is None else mailbox.start(size, has_own=has_own, early=early, reading=reading)


def owe(group: ProcessGroup, device: torch.device, work: Callable[[], None], purpose: Purpose = ROWS) -> None:
    """Have work of this rank's own enqueued before the current stream next waits for others, when it has nothing else
    to do; never, where they send no copies."""
    mailbox = _MAILBOXES.get((group.group_name, device.index, purpose))
    if mailbox is not None:
        mailbox.owed.append(work)


def all_read(group: ProcessGroup, device: torch.device, purpose: Purpose = ROWS) -> None:
    """Say that the current stream has got all reads of what this rank has waited for; what begins early, before it
    waits again, need not stand behind what the stream gets from here on."""
    mailbox = _MAILBOXES.get((group.group_name, device.index, purpose))
    if mailbox is not None:
        mailbox.quiet = torch.cuda.current_stream().record_event()


@contextmanager
def one_program() -> Iterator[None]:
    """What begins inside is enqueued once, in this order, as the captured work of a graph is: slots are then found free
    by that order. Elsewhere each exchange begins with a barrier, since a replay may have used slots unseen."""
    _PROGRAMS.append(object())
    try:
        yield
    finally:
        _PROGRAMS.pop()


_PROGRAMS: list[object] = []
_MAILBOXES: dict[tuple[str, int, Purpose], "Mailbox | None"] = {}
"""The mailbox of a group, by its name, on a device, for a purpose; None where the ranks found that they have none."""
_OUTGROWN: list["Mailbox"] = []
"""Mailboxes whose memory graphs write to, although larger ones have taken their place."""


def memory(*purposes: Purpose) -> int:
    """Bytes of this process's GPUs that other ranks write to for these purposes, which torch's allocator does not
    count. Meshes of the same ranks share them."""
    return sum(box.bytes for (*_, purpose), box in _MAILBOXES.items() if box is not None and purpose in purposes)


def _mailbox(group: ProcessGroup, device: torch.device, purpose: Purpose, size: int) -> "Mailbox | None":
    """The group's mailbox for a purpose, with slots of that many bytes. All ranks come here with the same size, and
    capture the same."""
    key = (group.group_name, device.index, purpose)
    mailbox = _MAILBOXES.get(key)
    if (mailbox is None and key in _MAILBOXES) or (mailbox is not None and mailbox.size >= size):
        return mailbox
    if torch.cuda.is_current_stream_capturing():
        return None
    if mailbox is not None and mailbox.captured:
        _OUTGROWN.append(mailbox)
    size = 1 << (size - 1).bit_length()
    memory = shared_memory(group, device, purpose.slots * size)
    _MAILBOXES[key] = None if memory is None else Mailbox(group, memory, device, purpose.slots, size)
    return _MAILBOXES[key]


class Mailbox:
    """Memory of each rank of a group that the others write to: slots of `size` bytes."""

    def __init__(self, group: ProcessGroup, memory: Any, device: torch.device, slots: int, size: int) -> None:
        self.size, self.bytes, self.handle = size, slots * size, memory
        self.rank, self.world = group.rank(), group.size()
        every = [self.handle.get_buffer(rank, (slots, size), torch.uint8) for rank in range(self.world)]
        self.slots_of = [buffer.unbind() for buffer in every]
        self.slots, self.barrier = Slots(slots), slots
        self.program: object = None
        self.stream = torch.cuda.current_stream(device)
        """The stream of the last exchange."""
        self.captured = False
        self.quiet: torch.cuda.Event | None = None
        """When all that had come was read; None where more has come since."""
        self.engine = torch.cuda.Stream(device, priority=-1)
        """The stream of copies to others."""
        self.ear = torch.cuda.Stream(device, priority=-1)
        """The stream that waits for the others' signals, beside what this rank still computes."""
        self.sent, self.heard = 0, 0
        """The number of messages, or pieces, that are on the engine, and of those that are known to have come."""
        self.latest: Exchange | None = None
        """The last one that was waited for."""
        self.owed: list[Callable[[], None]] = []
        """What is to be done before the stream waits."""

    def start(self, size: int, *, has_own: bool, early: bool, reading: bool) -> "Sending | None":
        """start() of this module."""
        exchange = self._take(self.latest if reading else None)
        if exchange is None:
            return None
        return Sending(self, exchange, size, has_own=has_own, since=self.quiet if early else None)

    def _take(self, reading: Exchange | None) -> Exchange | None:
        """An exchange in a free slot, after a barrier where none is known to be free."""
        stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        program = _PROGRAMS[-1] if _PROGRAMS else capturing
        self.captured = self.captured or capturing
        exchange = None
        if program is not self.program:
            self.program, self.quiet = program, None
            self.slots.clear()
            self.owed.clear()
        else:
            stream.wait_stream(self.stream)  # where reads of the last exchange are
            exchange = None if isinstance(program, bool) else self.slots.take()
        self.stream = stream
        if exchange is None:
            self.quiet = None
            self.handle.barrier(channel=self.barrier)
            self.slots.settle(reading)
            exchange = self.slots.take()
        return exchange


class Sending:
    """An exchange whose messages, of `size` bytes, leave piece by piece."""

    def __init__(
        self, mailbox: Mailbox, exchange: Exchange, size: int, *, has_own: bool, since: torch.cuda.Event | None
    ) -> None:
        self.mailbox, self.exchange, self.size, self.has_own = mailbox, exchange, size, has_own
        self.since = since
        """Behind what copies are enqueued; None: behind what is on the stream when they are."""
        self.last = 0
        """The number of its last message."""
        self.messages: list[Message] = []
        """What is on its way: it lives until the stream has waited for its copies."""

    @property
    def others(self) -> list[int]:
        """The ranks of the group but this one."""
        return [rank for rank in range(self.mailbox.world) if rank != self.mailbox.rank]

    def place(self, rank: int) -> Tensor:
        """uint8 [size]: where this rank's message to a rank lies, or, with its own number, where it keeps one for
        itself. Kernels of the current stream may write it, in place of send(); written() ends that."""
        box = self.mailbox
        place = box.rank - (not self.has_own and box.rank > rank)
        return box.slots_of[rank][self.exchange.slot][place * self.size : (place + 1) * self.size]

    def keep(self) -> None:
        """Have what comes stay good until release(), whatever ranks of the group exchange meanwhile."""
        self.exchange.kept = True

    def release(self) -> None:
        """Say that the current stream has got all reads of what keep() keeps."""
        self.exchange.kept = False

    def send(self, other: int, message: Message, first: int = 0) -> None:
        """Send a rank what is to lie from the byte `first` of its message on, once what is on the current stream has
        written it."""
        engine, place = self.mailbox.engine, self.place(other)
        if self.since is None:
            engine.wait_stream(torch.cuda.current_stream())
        else:
            engine.wait_event(self.since)
        with torch.cuda.stream(engine):
            _copy(place[first:], message)
        self.messages.append(message)
        self._count()

    def written(self) -> None:
        """Say that all places of other ranks are written by what is on the current stream."""
        self.mailbox.engine.wait_stream(torch.cuda.current_stream())
        self._count()

    def _count(self) -> None:
        self.mailbox.sent += 1
        self.last = self.mailbox.sent

    def received(self) -> Tensor:
        """begin()'s result, when all has been sent."""
        box, exchange = self.mailbox, self.exchange
        if not exchange.waited:
            owed, box.owed = box.owed, []
            for work in owed:
                work()
            if self.last > box.heard:
                self._hear()
            exchange.waited, box.latest, box.quiet = True, exchange, None
            self.messages.clear()
        rows = box.world - (not self.has_own)
        return box.slots_of[box.rank][exchange.slot][: rows * self.size].view(rows, self.size)

    def _hear(self) -> None:
        """Signal the others, and wait for their signals. An engine writes in the order in which ranks send, which is
        the same on all, so that whatever was sent before has come, too."""
        box = self.mailbox
        with torch.cuda.stream(box.engine):
            for other in self.others:
                box.handle.put_signal(other, self.exchange.slot)
        box.ear.wait_stream(box.engine)
        with torch.cuda.stream(box.ear):
            for other in self.others:
                box.handle.wait_signal(other, self.exchange.slot)
        torch.cuda.current_stream().wait_stream(box.ear)
        box.heard = box.sent


def _copy(place: Tensor, message: Message) -> None:
    """Copy a message to the beginning of a place."""
    first = 0
    for piece in _joined([piece.view(torch.uint8).view(-1) for piece in message]):
        place[first : first + len(piece)].copy_(piece)
        first += len(piece)


def _joined(pieces: Sequence[Tensor]) -> list[Tensor]:
    """uint8 pieces, of which those that follow each other in one memory are one: each copy costs an engine 8 us."""
    joined: list[Tensor] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and _follows(piece, last):
            joined[-1] = last.as_strided((len(last) + len(piece),), (1,))
        else:
            joined.append(piece)
    return joined


def _follows(piece: Tensor, last: Tensor) -> bool:
    same = piece.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and piece.data_ptr() == last.data_ptr() + len(last)
