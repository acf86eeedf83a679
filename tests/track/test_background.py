"""A tracker that hangs, or fails to open in time, never holds up who logs."""

import threading
import time

import pytest

from hqsweep.track import background
from hqsweep.track.background import BackgroundTracker


class Slow:
    """Keeps what it is given; waits at the gate before it takes anything."""

    def __init__(self):
        self.gate, self.calls = threading.Event(), []

    def _take(self, *call):
        self.gate.wait(10)
        self.calls.append(call)
        return True

    def log(self, step, values):
        self._take(step, values)

    def rewind(self, step):
        self._take("rewind", step)

    def sampled(self, step, rows):
        self._take("sampled", step, rows)

    def table(self, name, rows):
        self._take(name, rows)

    def finish(self, exit_code):
        return self._take("finish", exit_code)


@pytest.fixture
def slow():
    slow = Slow()
    yield slow
    slow.gate.set()


def test_calls_are_made_in_order_while_the_tracker_is_still_opening(slow):
    opening = threading.Event()

    def opened():
        opening.wait(10)
        return slow

    tracker, began = BackgroundTracker(opened), time.monotonic()
    values = {"loss": 1.0}
    tracker.rewind(0)
    tracker.sampled(1, [{"layer": "a"}])
    tracker.log(1, values)
    values["loss"] = 2.0  # the caller's own again
    tracker.table("stats", [])
    assert time.monotonic() - began < 1
    slow.gate.set()
    opening.set()
    assert tracker.finish(3) is True
    sampled = ("sampled", 1, [{"layer": "a"}])
    assert slow.calls == [("rewind", 0), sampled, (1, {"loss": 1.0}), ("stats", []), ("finish", 3)]


def test_a_tracker_that_hangs_is_left_behind(slow, monkeypatch, capsys):
    monkeypatch.setattr(background, "FINISH_TIMEOUT_S", 0.05)
    tracker = BackgroundTracker(lambda: slow)
    tracker.log(1, {"loss": 1.0})
    assert tracker.finish(0) is False
    assert "not finished in 0.05 s; `hqsweep sync` makes up for it" in capsys.readouterr().out


def test_what_does_not_fit_is_dropped_and_said_once(slow, monkeypatch, capsys):
    monkeypatch.setattr(background, "QUEUE", 2)
    monkeypatch.setattr(background, "FINISH_TIMEOUT_S", 0.05)
    tracker, began = BackgroundTracker(lambda: slow), time.monotonic()
    for step in range(100):
        tracker.log(step, {"loss": 1.0})
        tracker.sampled(step, [])
    assert not tracker.finish(0)
    assert time.monotonic() - began < 1
    assert capsys.readouterr().out.count("does not keep up") == 1
