"""A tracker mirrors a run's rows somewhere else. No tracker is a tracker too: the one that does nothing."""

from collections.abc import Mapping
from typing import Any, Protocol


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
