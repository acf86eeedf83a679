"""Messages between the GPUs of one machine, written by copy engines into memory that their ranks share.

A collective of NCCL runs on multiprocessors. Beside a GEMM that fills them it starts late, or takes some of them while
it waits, and the GEMM then takes up to half longer. A copy engine takes none. Measured on an H100 with 16384 x 2752
times 2752 x 2048 by halves and a sum of 34 MB: 278 us alone, 317 us beside copies, 427 us beside NCCL. The memory and
its signals are torch's (torch.distributed._symmetric_memory). This file decides when a part of the memory is free.

A mailbox has slots. In an exchange, every rank writes a message into one slot of each other rank. To read, a rank
signals that its own messages are written, and waits for the signals of the others. What has arrived is good until the
next exchange begins. Slots need no messages to become free, because two facts are enough:
- A rank that begins an exchange has enqueued its reads of all earlier exchanges that it has waited for.
- A rank that has waited for an exchange knows that all others have begun it.
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

from hqsweep.parallel.wire.memory import shared_memory


@dataclass(eq=False)
class Exchange:
    slot: int
    begun: int
    """The number of exchanges that had begun before it."""
    waited: bool = False
    """Whether this rank has waited for it, and so knows that all others have begun it."""
    read: int | None = None
    """The number of exchanges that had begun when all its reads were enqueued."""
    kept: bool = False
    """Whether it is read after later exchanges have begun."""


class Slots:
    """Finds free slots from the order in which exchanges begin and are waited for, which is the same on all ranks."""

    def __init__(self, count: int) -> None:
        self.last: list[Exchange | None] = [None] * count
        self.recent: deque[Exchange] = deque(maxlen=2 * count)
        self.begun = 0

    def take(self) -> Exchange | None:
        """A new exchange in a free slot; None where no slot is known to be free.

        This rank signals for the new exchange only after the reads of all exchanges that it has waited for.
        """
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
        """Whether the other ranks have enqueued their reads of `last`, as a later exchange that was waited for
        shows."""
        read = last.read
        return read is not None and any(each.waited and each.begun >= read for each in self.recent)

    def settle(self, reading: Exchange | None = None) -> None:
        """Free slots after a barrier, when the other ranks have finished all that they had enqueued.

        Not freed are exchanges that were not waited for, exchanges that are kept, and `reading`, which is still to be
        read.
        """

        def stays(last: Exchange) -> bool:
            return not last.waited or last.kept or last is reading

        self.last = [last if last is not None and stays(last) else None for last in self.last]

    def clear(self) -> None:
        """Forget all exchanges, also exchanges that no rank will wait for, as after a failed capture."""
        self.last = [None] * len(self.last)
        self.recent.clear()


LEAST_BYTES = 1 << 20
"""The least bytes of a message for which a copy engine is faster than NCCL."""


class Purpose(NamedTuple):
    """The use of a mailbox. Each purpose has its own mailbox and its own order of exchanges."""

    name: str
    slots: int
    """The number of slots: two for each exchange that is on its way at the same time."""
    most: int
    """The most bytes of a slot."""


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
    """Start to send each other rank of the group its message. Returns a function that waits and gives what has arrived;
    None, on all ranks, where no mailbox can take the messages and the caller must use a collective.

    The result is uint8 [W, bytes] in order of ranks, with the message `own` in this rank's place, or [W - 1, bytes]
    without `own`. It is good until the next begin() of this group and purpose. Messages have the same sizes on all
    ranks, and must not be written to before the result is asked for.

    early: the messages were complete at the last all_read() of the group. They may leave since then, beside all work
    that the stream has got meanwhile.
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
    """A begin() whose messages, of `size` bytes, leave piece by piece. All ranks call it at the same place.

    reading: the last exchange is still to be read, by the kernels that write the messages.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or "nccl" not in dist.get_backend(group):
        return None
    received = size * (group.size() - (not has_own))
    if size < LEAST_BYTES or size % WORD or received > purpose.most:
        return None
    mailbox = _mailbox(group, device, purpose, received)
    return None if mailbox is None else mailbox.start(size, has_own=has_own, early=early, reading=reading)


def owe(group: ProcessGroup, device: torch.device, work: Callable[[], None], purpose: Purpose = ROWS) -> None:
    """Defer local work until the current stream would wait for other ranks. Without a mailbox the work is dropped."""
    mailbox = _MAILBOXES.get((group.group_name, device.index, purpose))
    if mailbox is not None:
        mailbox.owed.append(work)


def all_read(group: ProcessGroup, device: torch.device, purpose: Purpose = ROWS) -> None:
    """Note that the current stream has enqueued all reads of received messages.

    Exchanges that begin early, before the next wait, need not run after later work of the stream.
    """
    mailbox = _MAILBOXES.get((group.group_name, device.index, purpose))
    if mailbox is not None:
        mailbox.quiet = torch.cuda.current_stream().record_event()


@contextmanager
def one_program() -> Iterator[None]:
    """The context of work that is enqueued once and in this order, such as the work that a CUDA graph captures.

    Slots are found free by this order. Elsewhere each exchange begins with a barrier, since a replay may have used
    slots unseen.
    """
    _PROGRAMS.append(object())
    try:
        yield
    finally:
        _PROGRAMS.pop()


_PROGRAMS: list[object] = []
_MAILBOXES: dict[tuple[str, int, Purpose], "Mailbox | None"] = {}
"""(name of a group, GPU, purpose) -> its mailbox; None where the ranks have found that they cannot have one."""
_OUTGROWN: list["Mailbox"] = []
"""Mailboxes that larger ones have replaced, while graphs still write to their memory."""


def memory(*purposes: Purpose) -> int:
    """Bytes on this process's GPUs that other ranks write to for these purposes. torch's allocator does not count them.

    Meshes of the same ranks share them.
    """
    return sum(box.bytes for (*_, purpose), box in _MAILBOXES.items() if box is not None and purpose in purposes)


def _mailbox(group: ProcessGroup, device: torch.device, purpose: Purpose, size: int) -> "Mailbox | None":
    """The group's mailbox for a purpose, with slots of at least `size` bytes; None where it cannot have one.

    All ranks call it with the same size, while all or none of them capture a graph.
    """
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
    """Memory of each rank of a group that the others write to, in slots of `size` bytes."""

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
        """The event after the reads of all that has arrived; None where more has arrived since."""
        self.engine = torch.cuda.Stream(device, priority=-1)
        """The stream of copies to other ranks."""
        self.ear = torch.cuda.Stream(device, priority=-1)
        """The stream that waits for the signals of other ranks, beside this rank's own work."""
        self.sent, self.heard = 0, 0
        """The number of messages, or pieces, on the engine; `heard`: how many of them are known to have arrived."""
        self.latest: Exchange | None = None
        """The last exchange that was waited for."""
        self.owed: list[Callable[[], None]] = []
        """Deferred local work, run just before the next wait."""

    def start(self, size: int, *, has_own: bool, early: bool, reading: bool) -> "Sending | None":
        """See the function start() of this file."""
        exchange = self._take(self.latest if reading else None)
        if exchange is None:
            return None
        return Sending(self, exchange, size, has_own=has_own, since=self.quiet if early else None)

    def _take(self, reading: Exchange | None) -> Exchange | None:
        """An exchange in a free slot, after a barrier where no slot is known to be free."""
        stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        program = _PROGRAMS[-1] if _PROGRAMS else capturing
        self.captured = self.captured or capturing
        exchange = None
        if program is not self.program:
            self.program, self.quiet = program, None
            self.slots.clear()
            self.owed.clear()
        else:
            stream.wait_stream(self.stream)  # it has the reads of the last exchange
            exchange = None if isinstance(program, bool) else self.slots.take()
        self.stream = stream
        if exchange is None:
            self.quiet = None
            self.handle.barrier(channel=self.barrier)
            self.slots.settle(reading)
            exchange = self.slots.take()
        return exchange


class Sending:
    """An exchange that sends its messages, of `size` bytes, piece by piece."""

    def __init__(
        self, mailbox: Mailbox, exchange: Exchange, size: int, *, has_own: bool, since: torch.cuda.Event | None
    ) -> None:
        self.mailbox, self.exchange, self.size, self.has_own = mailbox, exchange, size, has_own
        self.since = since
        """The event behind which copies are enqueued; None: behind the current stream at the time of each copy."""
        self.last = 0
        """The number of its last message."""
        self.messages: list[Message] = []
        """The messages on their way, kept alive until the stream has waited for their copies."""

    @property
    def others(self) -> list[int]:
        """All ranks of the group except this one."""
        return [rank for rank in range(self.mailbox.world) if rank != self.mailbox.rank]

    def place(self, rank: int) -> Tensor:
        """uint8 [size]: the place of this rank's message in a rank's memory. This rank's own number gives the place of
        `own`.

        Kernels of the current stream may write it in place of send(); call written() afterwards.
        """
        box = self.mailbox
        place = box.rank - (not self.has_own and box.rank > rank)
        return box.slots_of[rank][self.exchange.slot][place * self.size : (place + 1) * self.size]

    def keep(self) -> None:
        """Keep what arrives good until release(), through later exchanges of the group."""
        self.exchange.kept = True

    def release(self) -> None:
        """Note that the current stream has enqueued all reads of the messages of keep()."""
        self.exchange.kept = False

    def send(self, other: int, message: Message, first: int = 0) -> None:
        """Send a rank a piece of its message, from the byte `first` on, once the current stream has written the
        piece."""
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
        """Note that the current stream has written the places of all other ranks."""
        self.mailbox.engine.wait_stream(torch.cuda.current_stream())
        self._count()

    def _count(self) -> None:
        self.mailbox.sent += 1
        self.last = self.mailbox.sent

    def received(self) -> Tensor:
        """begin()'s result. Call it when all messages are sent."""
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
        """Signal the other ranks, and wait for their signals.

        An engine writes in the order in which ranks send. The order is the same on all ranks, so all earlier messages
        have arrived, too.
        """
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
    """The pieces of a message as uint8, with neighbours in memory joined, because each copy costs an engine 8 us."""
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
