"""When a rank signals and waits, and what it does before: of exchanges on a device that notes what it gets."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.p2p_copy import Exchange

SIZE = 32


@pytest.fixture
def mailbox(monkeypatch):
    """A mailbox of rank 0 of two, of which each memory is a tensor, and whose log has signals and waits."""
    log = []
    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)

    @contextmanager
    def on(_):
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    handle = SimpleNamespace(
        put_signal=lambda rank, slot: log.append(("signal", rank, slot)),
        wait_signal=lambda rank, slot: log.append(("wait", rank, slot)),
    )
    slots_of = [torch.zeros(4, 2 * SIZE, dtype=torch.uint8).unbind() for _ in range(2)]
    fields = {"rank": 0, "world": 2, "handle": handle, "slots_of": slots_of, "log": log, "owed": [], "sent": 0}
    return SimpleNamespace(**fields, heard=0, latest=None, quiet=None, engine=stream, ear=stream)


def sending(mailbox, slot, *, has_own=False):
    return p2p_copy.Sending(mailbox, Exchange(slot, slot), SIZE, has_own=has_own, since=None)


def message(value):
    return (torch.full((SIZE,), value, dtype=torch.uint8),)


def test_what_was_sent_before_needs_no_signal_of_its_own(mailbox):
    first, second, third = (sending(mailbox, slot) for slot in range(3))
    first.send(1, message(1))
    second.send(1, message(2))
    second.received()
    assert mailbox.log == [("signal", 1, 1), ("wait", 1, 1)]
    first.received()
    assert len(mailbox.log) == 2
    third.send(1, message(3))
    third.received()
    third.received()
    assert mailbox.log[2:] == [("signal", 1, 2), ("wait", 1, 2)]
    assert [int(mailbox.slots_of[1][slot][0]) for slot in range(3)] == [1, 2, 3]


def test_what_is_sent_after_others_were_heard_is_signalled(mailbox):
    """An exchange that has begun before them, and of which a piece left later."""
    first, second = sending(mailbox, 0), sending(mailbox, 1)
    first.send(1, (message(1)[0][: SIZE // 2],))
    second.send(1, message(2))
    second.received()
    first.send(1, (message(1)[0][SIZE // 2 :],), SIZE // 2)
    first.received()
    assert mailbox.log == [("signal", 1, 1), ("wait", 1, 1), ("signal", 1, 0), ("wait", 1, 0)]


def test_what_kernels_write_is_signalled_too(mailbox):
    exchange = sending(mailbox, 3, has_own=True)
    exchange.place(1).fill_(7)
    exchange.place(0).fill_(5)
    exchange.written()
    exchange.received()
    assert mailbox.log == [("signal", 1, 3), ("wait", 1, 3)]
    assert mailbox.slots_of[1][3][:SIZE].eq(7).all() and mailbox.slots_of[0][3][:SIZE].eq(5).all()


def test_own_work_comes_before_a_wait_and_once(mailbox):
    mailbox.owed += [lambda: mailbox.log.append("own")]
    exchange = sending(mailbox, 0)
    exchange.send(1, message(1))
    exchange.received()
    exchange.received()
    assert mailbox.log == ["own", ("signal", 1, 0), ("wait", 1, 0)] and not mailbox.owed


def test_pieces_that_lie_together_are_one_copy(monkeypatch):
    memory = torch.arange(64, dtype=torch.uint8)
    apart = torch.arange(100, 132, dtype=torch.uint8)
    place = torch.zeros(96, dtype=torch.uint8)
    joined = p2p_copy._joined([memory[:32].view(torch.int32).view(torch.uint8), memory[32:48], apart])
    assert [len(piece) for piece in joined] == [48, 32]
    assert len(p2p_copy._joined([memory[16:32], memory[:16]])) == 2  # which follow the other way round
    p2p_copy._copy(place, [memory[:32].view(2, 4, 4), memory[32:48].view(torch.float32), apart])
    assert place[:80].tolist() == [*range(48), *range(100, 132)]
