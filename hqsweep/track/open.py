"""The tracker that the `track` section of a run's config asks for: of the run itself, and of the report on it.

A run's tracker works in a thread of its own, so that training never waits for it. What a stuck tracker does not take is
lost to the mirror only, and `hqsweep sync` makes that again from the rows. wandb and torch are imported where a tracker
needs them, so that `hqsweep compare` starts fast.
"""

import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hqsweep.config.engine import TrackConfig, check_installed
from hqsweep.config.jobs import MIRRORED_TABLES
from hqsweep.errors import UserError
from hqsweep.host import Busy
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
        if kind == "trackio":
            from hqsweep.track.trackio import open_trackio

            return open_trackio(run, config, partial(_steps, run))
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
    """Show the verdicts beside runs that W&B, TensorBoard or trackio tracks, and keep the report folder in W&B; False
    when there is none to keep it by. `arms` come from `hqsweep compare --json`."""
    track = runs[0].config().get("track", {})
    kind = track.get("kind", "none")
    if kind == "none" or find_spec(kind) is None:
        return False
    if kind == "tensorboard":
        from hqsweep.track.tensorboard import log_report as log_verdicts

        return log_verdicts(runs[0].sweep_path, report, arms)
    if kind == "trackio":
        from hqsweep.track.trackio import log_verdicts as log_table

        return log_table(runs[0].sweep, track, report.name, arms)
    from hqsweep.track.wandb import log_report

    return log_report(runs[0].sweep_path, track, report, arms)


def sync(run: RunDir, mode: str) -> list[Path]:
    """Replay the rows of a run: to TensorBoard or trackio where its config tracks by that, else under its W&B id.
    Returns TensorBoard's folder, or the folders that `wandb sync` would upload, none where the rows went to the server
    or to trackio.

    Offline, what W&B had of the run is replaced. Online, the server keeps the steps that it has and takes later ones.
    mode: offline, online or auto, as track.mode. Raises UserError for a run at work, and for a missing package.
    """
    config = run.config()
    config["track"] = TrackConfig().model_dump() | (config.get("track") or {}) | {"mode": mode}
    mirrors = {"tensorboard": _to_tensorboard, "trackio": _to_trackio}
    kind = config["track"]["kind"] if config["track"]["kind"] in mirrors else "wandb"
    check_installed(kind)
    try:
        with run.lock():
            return mirrors.get(kind, _to_wandb)(run, config)
    except Busy:
        raise UserError(f"{run.name}: it is at work; sync it when it has ended") from None


def _to_wandb(run: RunDir, config: dict[str, Any]) -> list[Path]:
    from hqsweep.track.wandb import known_id_of, offline_folders, open_run  # the other kind works without wandb

    known = known_id_of(run)
    _check_no_link(run.path / "wandb")
    for folder in offline_folders(run):
        shutil.rmtree(folder)
    replay(run, open_run(run, config, known))
    return offline_folders(run)


def _to_tensorboard(run: RunDir, config: dict[str, Any]) -> list[Path]:
    from hqsweep.track.tensorboard import open_tensorboard, tensorboard_folder

    _check_no_link(tensorboard_folder(run))
    replay(run, open_tensorboard(run, config))
    return [tensorboard_folder(run)]


def _to_trackio(run: RunDir, config: dict[str, Any]) -> list[Path]:
    from hqsweep.track.trackio import open_trackio

    replay(run, open_trackio(run, config, partial(_steps, run)))
    return []


def _check_no_link(folder: Path) -> None:
    """UserError where a mirror that is to be replaced lies behind a link."""
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link, and what is behind it is not deleted; remove the link, then sync again")


def replay(run: RunDir, tracker: Tracker) -> None:
    """Give a tracker all rows of a run, step by step, as they came."""
    tracker.rewind(-1)
    for step, metrics, stats in _steps(run):
        if stats:
            tracker.sampled(step, stats)
        if metrics:
            tracker.log(step, {row["metric"]: row["value"] for row in metrics})
    for table in MIRRORED_TABLES:
        tracker.table(table, run.rows(table))
    tracker.finish(run.written_status()["exit_code"] or 0)


def _steps(run: RunDir) -> Iterator[tuple[int, list[dict], list[dict]]]:
    """(step, rows of metrics, rows of stats) of every step that has any, in order."""
    by_step = itemgetter("step")
    metrics, stats = (
        {step: list(rows) for step, rows in groupby(run.rows(table), by_step)} for table in ("metrics", "stats")
    )
    for step in sorted(metrics.keys() | stats.keys()):
        yield step, metrics.get(step, []), stats.get(step, [])
