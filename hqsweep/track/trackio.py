"""trackio as a mirror of the rows, in its own folder on this machine, where `trackio show` finds it: never the death of
a run.

trackio takes no step back. So a resumed run is deleted there, and written again from its rows.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import pandas as pd
import trackio

from hqsweep.config.jobs import VERDICT_COLUMNS
from hqsweep.errors import visible
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tracker import HarmlessTracker, curves, harmless, trackio_server, verdict_scalars

TABLE_ROWS = 500
"""The rows of a table that are mirrored, the first ones."""
QUIET = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
Steps = Callable[[], Iterable[tuple[int, list[dict[str, Any]], list[dict[str, Any]]]]]
"""Gives (step, rows of metrics, rows of stats) of the steps of a run."""


def open_trackio(run: RunDir, config: Mapping[str, Any], steps: Steps) -> "TrackioTracker":
    """The mirror of a run: its name is SWEEP/RUN, its group the sweep."""
    return TrackioTracker(f"{run.sweep}/{run.name}", run.sweep, config, steps)


class TrackioTracker(HarmlessTracker):
    """Tracker over a run of trackio, which `rewind` opens."""

    who = "trackio"

    def __init__(self, name: str, group: str, config: Mapping[str, Any], steps: Steps = tuple) -> None:
        super().__init__()
        self._name, self._group, self._config, self._steps = visible(name), visible(group), config, steps
        self._run: Any = None
        self._step = 0

    @harmless
    def rewind(self, step: int) -> None:
        project = self._config["track"]["project"]
        if trackio_server(self._config["track"], os.environ) is None:  # asked of the environment, and not of this run
            for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(key, None)
        with redirect_stdout(sys.stderr):
            with suppress(ValueError):  # a project that is not there yet
                for known in list(trackio.Api().runs(project)):
                    if known.name == self._name:
                        known.delete()
            fields = {"name": self._name, "group": self._group, "config": dict(self._config)}
            self._run = trackio.init(project=project, **fields, **QUIET)
        for at, metrics, stats in self._steps():
            if at <= step:
                self._run.log({row["metric"]: row["value"] for row in metrics} | curves(stats), step=at)

    @harmless
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    @harmless
    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        if rows and name != "stats":  # its curves are there
            self._run.log({name: trackio.Table(dataframe=pd.DataFrame(rows[:TABLE_ROWS]))}, step=self._step)

    @harmless
    def finish(self, exit_code: int) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def log_verdicts(sweep: str, track: Mapping[str, Any], report: str, arms: Sequence[Mapping[str, Any]]) -> bool:
    """The verdicts of `arms` (of `hqsweep compare --json`) as a run beside those of the sweep: a table, and
    tracker.verdict_scalars() as TAG/ARM. Returns whether they are kept; never raises."""
    tracker = TrackioTracker(f"{sweep}/report {report}", sweep, {"job": "report", "track": dict(track)})
    scalars = {f"{tag}/{visible(arm['arm'])}": value for arm in arms for tag, value in verdict_scalars(arm).items()}
    rows = [{column: arm[column] for column in VERDICT_COLUMNS} for arm in arms]
    return all([tracker.rewind(-1), tracker.log(0, scalars), tracker.table("verdicts", rows), tracker.finish(0)])
