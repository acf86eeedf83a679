"""A tracker mirrors a run's rows to another place. Without one, a tracker runs that does nothing."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

SAMPLED = ("sqnr_db", "amax", "underflow_pct", "saturation_pct", "load")
"""Error statistics that are mirrored as curves; all of them are in the table at the end."""


class Tracker(Protocol):
    """The mirror of one run. It never raises once it is open: losing the mirror must not lose the run."""

    def rewind(self, step: int) -> None:
        """The rows after `step` are taken back: before the first row of every attempt, with -1 for an attempt from the
        start."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step; steps never go down within one process."""

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Rows of the table "stats" of one step, before its metrics."""

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """A table of rows with equal columns, once, at the end."""

    def finish(self, exit_code: int) -> bool:
        """Close the mirror; False when it had to be left behind unfinished."""


class NullTracker:
    """track.kind=none."""

    def rewind(self, step: int) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def sampled(self, step: int, rows: list[dict[str, Any]]) -> None:
        pass

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        pass

    def finish(self, exit_code: int) -> bool:
        return True


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rows of the table "stats" -> SAMPLED by name, STATISTIC/LAYER/TENSOR/DIRECTION, as in
    "sqnr_db/layers.0.attn.qkv/input/rowwise": the first word names the panel. Missing values are left out."""
    return {
        f"{name}/{row['layer']}/{row['tensor']}/{row['direction']}": row[name]
        for name in SAMPLED
        for row in rows
        if row[name] is not None
    }


class HarmlessTracker:
    """Base of trackers whose methods are `harmless`."""

    who: ClassVar[str]
    """The beginning of its lines in the log."""

    def __init__(self) -> None:
        self._complaints: set[str] = set()

    def complain(self, line: str) -> None:
        """Say it in the log, once."""
        if line not in self._complaints:
            self._complaints.add(line)
            print(f"{self.who}: {line}; the run goes on, its rows are in its folder", flush=True)


def harmless(method: Callable[..., Any]) -> Callable[..., bool]:
    """Whatever the method raises becomes a complaint, and the result False."""

    @functools.wraps(method)
    def guarded(self: HarmlessTracker, *args: Any, **kwargs: Any) -> bool:
        try:
            return method(self, *args, **kwargs) is not False
        except Exception as error:
            self.complain(f"{method.__name__}: {one_line(error)}")
            return False

    return guarded


def one_line(error: Exception) -> str:
    """Type and message of an error without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def verdict_scalars(arm: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value of an arm: gap_pct, or whole_run_gap_pct where forks end together, both with _low and _high, the
    ends of the 95 % interval; slowdown_pct with its ends; and lasting_pct, the part of the gap that lasts."""
    gap = "gap_pct" if arm.get("end") is None else "whole_run_gap_pct"
    names = {gap: "gap", f"{gap}_low": "ci_low", f"{gap}_high": "ci_high"}
    names |= {name: name for name in ("slowdown_pct", "slowdown_low", "slowdown_high", "lasting_pct")}
    return {tag: arm[name] for tag, name in names.items() if arm.get(name) is not None}
