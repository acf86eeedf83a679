"""Times on a device that do not flatter: L2 flushed, clocks warm, variants alternated, medians."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]
L2_FLUSH_BYTES = 256 * 2**20
WARM_SECONDS = 0.3
CYCLES_A_SECOND = 2e9
"""The approximate cycles a second of torch.cuda._sleep."""
TURN = 20
"""The number of calls in a turn of host_steps: so few that the device's queue does not fill up, where a launch would
wait."""
HEAD_START = 5e-4
"""The seconds for which the device waits, longer than a call of one operator needs to enqueue its kernels."""


class Cuda:
    """Medians of calls on the current GPU, each between two events behind a write that empties the L2 cache.

    A kernel that only waits stands before that write, so that the launches are enqueued by the time the first event
    is reached: the time is the device's alone.
    """

    def __init__(self, repeats: int, head_start: float = HEAD_START) -> None:
        self.repeats, self.head_start = repeats, int(head_start * CYCLES_A_SECOND)
        self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.warm_clocks()

    def warm_clocks(self) -> None:
        """Keep the GPU busy for a while: an idle one has slow clocks."""
        end = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < end:
            self.flush.zero_()
            torch.cuda.synchronize()

    def medians(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """The median seconds of each call, run alternately after some rounds that are not counted."""
        for call in (c for c in calls.values() for _ in range(3)):
            call()
        torch.cuda.synchronize()
        events = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(self.head_start)
                self.flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
        return {n: statistics.median(s.elapsed_time(e) for s, e in pairs) * 1e-3 for n, pairs in events.items()}


def host_seconds(call: Call, calls: int = 100, batches: int = 10) -> float:
    """The median seconds of CPU clock that one call takes to enqueue its work; the device is waited for between
    batches."""
    times = []
    for _ in range(batches + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[2:])


class HostTime(NamedTuple):
    """The seconds of many calls."""

    median: float
    low: float
    """The 5th percentile."""


def host_steps(calls: Mapping[str, Call], steps: int, device: str) -> dict[str, HostTime]:
    """The times until each of `steps` calls returns, in turns of a few calls, before which the device is waited for."""
    times = {name: [] for name in calls}
    for turn in range(-1, -(-steps // TURN)):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                if turn >= 0:  # the one before warms up
                    times[name].append(time.perf_counter() - start)
    return {name: HostTime(statistics.median(laps), sorted(laps)[len(laps) // 20]) for name, laps in times.items()}


def cpu_medians(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """The median seconds of each call, alternated; each takes as many rounds as fit in `seconds`, and at least
    three."""
    times = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    while any(len(times[n]) < 4 or (spent[n] < seconds and len(times[n]) < 200) for n in calls):
        for name, call in calls.items():
            if len(times[name]) >= 4 and spent[name] >= seconds:
                continue
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
            spent[name] += times[name][-1]
    return {name: statistics.median(laps[1:]) for name, laps in times.items()}


def copy_call(x: Tensor) -> Call:
    """A device copy of x: the unit for the speed of memory."""
    target = torch.empty_like(x)
    return lambda: target.copy_(x)
