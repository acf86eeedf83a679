"""A tracker mirrors a run's rows somewhere else. No tracker is a tracker too: the one that does nothing."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from hqsweep.errors import UserError
from hqsweep.sweep.store import RunDir

MIRRORED_TABLES = ("stats", "parity", "calibrate")
"""Tables that a tracker gets as a whole, beside the metrics."""


class Tracker(Protocol):
    """The mirror of one run. It never raises once it is open: losing the mirror must not lose the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step; steps never go down within one process."""

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """A table of rows with equal columns, once, at the end."""

    def finish(self, exit_code: int) -> bool:
        """Close the mirror; False when it had to be left behind unfinished."""


class NullTracker:
    """track.kind=none."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        pass

    def finish(self, exit_code: int) -> bool:
        return True


def open_tracker(run: RunDir) -> Tracker:
    """The tracker that the `track` section of the run's config asks for.

    Raises UserError when it asks for wandb and there is none.
    """
    config = run.config()
    if config["track"]["kind"] == "none":
        return NullTracker()
    if find_spec("wandb") is None:
        raise UserError("track.kind: 'wandb' needs the package wandb; `pip install wandb`, or set track=none")
    from hqsweep.track.background import BackgroundTracker

    def opened() -> Tracker:
        from hqsweep.track.wandb import open_run  # only here, so that track=none works without wandb

        return open_run(run, config)

    return BackgroundTracker(opened)
