"""A tracker in a thread of its own: training never waits for it, whatever it waits for itself.

What a stuck tracker does not take is lost to the mirror only, and `hqsweep sync` makes that again from the rows.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hqsweep.track.tracker import Tracker

QUEUE = 100_000
"""Calls that may wait: days of training at one in ten steps."""
FINISH_TIMEOUT_S = 120.0
"""How long the end of a run waits for what is left, uploads included."""


class BackgroundTracker:
    """Tracker whose calls are made, in order, by a thread that first opens the real one."""

    def __init__(self, opened: Callable[[], Tracker]) -> None:
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(QUEUE)
        self._full = self._finished = False
        self._thread = threading.Thread(target=self._work, args=(opened,), daemon=True)
        self._thread.start()

    def _work(self, opened: Callable[[], Tracker]) -> None:
        tracker = opened()
        while True:
            method, arguments = self._calls.get()
            result = getattr(tracker, method)(*arguments)
            if method == "finish":
                self._finished = bool(result)
                return

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            if not self._full:
                self._full = True
                print("tracker: it does not keep up; `hqsweep sync` makes up for what it misses", flush=True)

    def rewind(self, step: int) -> None:
        self._put("rewind", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put("log", step, dict(values))

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._put("sampled", step, rows)

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        self._put("table", name, rows)

    def finish(self, exit_code: int) -> bool:
        self._put("finish", exit_code)
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            print(f"tracker: not finished in {FINISH_TIMEOUT_S:g} s; `hqsweep sync` makes up for it", flush=True)
        return self._finished
