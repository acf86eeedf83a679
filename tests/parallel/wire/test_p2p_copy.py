"""Messages between GPUs: which slots are free, and that what arrives is what collectives bring."""

import random

import pytest
from support.parallel import peer_ranks
from support.ranks import run_ranks

from hqsweep.parallel.wire import memory
from hqsweep.parallel.wire.p2p_copy import Slots

COUNT = 4


@pytest.mark.parametrize("count", [1, 2, COUNT])
@pytest.mark.parametrize("seed", range(10))
def test_a_slot_is_taken_again_only_when_all_have_read_it(seed, count):
    """Exchanges begin and are waited for in some order; the other rank is as far behind as its messages allow."""
    draw, slots = random.Random(seed), Slots(count)
    begun, read, last, pending = {}, {}, {}, []
    known, reused, refused = -1, 0, 0
    """The moment to which the other rank has certainly come."""
    for now in range(500):
        if pending and draw.random() < 0.5:
            exchange = pending.pop(draw.randrange(len(pending)))
            exchange.waited, read[exchange] = True, None
            known = max(known, begun[exchange])
            continue
        read |= {each: now for each, moment in read.items() if moment is None}
        exchange = slots.take()
        if exchange is None:
            refused += 1
            known = now
            slots.settle()
            exchange = slots.take()
        if exchange is None:
            assert len(pending) == count
            continue
        if before := last.get(exchange.slot):
            assert before not in pending and read[before] <= known
            reused += 1
        begun[exchange], last[exchange.slot] = now, exchange
        pending.append(exchange)
    assert reused > 50 and refused > 5


def test_two_exchanges_at_a_time_need_no_barrier():
    slots = Slots(COUNT)
    for _ in range(10):
        first, second = slots.take(), slots.take()
        first.waited = second.waited = True
    assert slots.begun == 20


def test_a_barrier_frees_no_slot_that_is_still_to_be_read():
    """A kernel that reads what came last writes the next messages, so that its slot is taken before."""
    slots = Slots(2)
    last = slots.take()
    last.waited = True
    slots.settle(last)
    assert [slots.take().slot, slots.take()] == [1 - last.slot, None]
    slots = Slots(2)
    last = slots.take()
    last.waited = True
    slots.settle()
    assert {slots.take().slot, slots.take().slot} == {0, 1}


def test_what_is_kept_stays_until_it_is_released():
    slots = Slots(COUNT)
    kept = slots.take()
    kept.kept = kept.waited = True
    for _ in range(20):
        exchange = slots.take()
        if exchange is None:
            slots.settle()
            exchange = slots.take()
        assert exchange.slot != kept.slot
        exchange.waited = True
    kept.kept = False
    taken = []
    for _ in range(COUNT + 1):
        taken.append(slots.take())
        taken[-1].waited = True
    assert kept.slot in [each.slot for each in taken]
    slots = Slots(2)
    kept = slots.take()
    kept.kept = kept.waited = True
    slots.settle()
    assert [slots.take().slot, slots.take()] == [1 - kept.slot, None]


def test_what_nobody_waits_for_is_forgotten():
    slots = Slots(COUNT)
    assert [slots.take().slot for _ in range(COUNT)] == list(range(COUNT))
    slots.settle()
    assert slots.take() is None
    slots.clear()
    assert slots.take().slot == 0


def test_ranks_are_neighbours_on_one_machine_with_a_gpu_each():
    places = [("node", "gpu 0"), ("node", "gpu 1")]
    assert memory.are_neighbours(places)
    assert not memory.are_neighbours([*places, ("other", "gpu 2")])
    assert not memory.are_neighbours([*places, ("node", "gpu 1")])


def test_units_take_collectives_where_there_are_no_copies():
    one, other = run_ranks(2, peer_ranks.units_by_collectives)
    assert one == [[1.0, 1.0, 2.0, 2.0], [0.0, 3.0]]
    assert other == [[1.0, 1.0, 2.0, 2.0], [6.0, 9.0]]


@pytest.mark.gpu2
@pytest.mark.parametrize(("which", "messages"), list(enumerate(peer_ranks.WORK.values())))
def test_messages_bring_what_collectives_bring(which, messages):
    for faults, sent in run_ranks(2, peer_ranks.beside_collectives, which, backend="nccl"):
        assert faults == []
        assert sent is None or sent >= 3 * messages  # of three runs
