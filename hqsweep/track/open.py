"""The tracker that the `track` section of a run's config asks for: of the run itself, and of the report on it.

A run's tracker works in a thread of its own, so that training never waits for it. What a stuck tracker does not take is
lost to the mirror only, and `hqsweep sync` makes that again from the rows. wandb and torch are imported where a tracker
needs them, so that `hqsweep compare` starts fast.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqsweep.config.engine import check_installed
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tracker import NullTracker, Tracker


def open_tracker(run: RunDir) -> Tracker:
    """The tracker that the `track` section of the run's config asks for.

    Raises UserError when it asks for one whose package is not there.
    """
    config = run.config()
    kind = config["track"]["kind"]
    if kind == "none":
        return NullTracker()
    check_installed(kind)

    def opened() -> Tracker:
        if kind == "tensorboard":  # only here, so that a kind works without the packages of the others
            from hqsweep.track.tensorboard import open_tensorboard

            return open_tensorboard(run, config)
        from hqsweep.track.wandb import open_run

        return open_run(run, config)

    return BackgroundTracker(opened)


QUEUE = 100_000
"""Calls that may wait: days of training at one in ten steps."""
FINISH_TIMEOUT_S = 120.0
"""Seconds that the end of a run waits for pending calls, uploads included."""


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


def mirror_report(runs: Sequence[RunDir], report: Path, arms: Sequence[Mapping[str, Any]]) -> bool:
    """Show the verdicts beside runs that W&B or TensorBoard tracks, and keep the report folder in W&B; False when there
    is none to keep it by. `arms` come from `hqsweep compare --json`."""
    track = runs[0].config().get("track", {})
    kind = track.get("kind", "none")
    if kind == "none" or find_spec(kind) is None:
        return False
    if kind == "tensorboard":
        from hqsweep.track.tensorboard import log_report as log_verdicts

        return log_verdicts(runs[0].sweep_path, report, arms)
    from hqsweep.track.wandb import log_report

    return log_report(runs[0].sweep_path, track, report, arms)
