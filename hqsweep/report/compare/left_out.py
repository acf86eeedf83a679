"""Runs that a comparison cannot use: their names, the fault of which file, and the remedy.

state is "missing", "damaged", "foreign" (a folder that its sweep does not list), OTHER_DATA or UNKNOWN_DATA (it did not
read the data of its baseline), or the state of a run without a result. A run whose loss diverged is not left out: that
is its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.errors import EXIT_FAILED, Damaged, Missing
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import MOVE

GO_ON = "the sweep's `hqsweep run` command goes on with it"
OTHER_DATA, UNKNOWN_DATA = "of other data", "of unknown data"
SHOWN = 5
"""The number of runs that a text names; --json has all."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that is left out; `run` is SWEEP/NAME, `file` a path."""

    run: str
    state: str
    file: str
    fault: str
    remedy: str

    @property
    def line(self) -> str:
        """A line such as: ci/mxfp8-s0-1f2e3d4c5b is damaged: metrics.jsonl is gone; the sweep's command repeats the
        run."""
        name = Path(self.file).name
        what = self.fault if name in ("", Path(self.run).name) else f"{name} {self.fault}"
        return f"{self.run} is {self.state}: {what}; {self.remedy}"


UNFIT = ("damaged", OTHER_DATA, UNKNOWN_DATA)
"""The states of runs that no waiting makes usable."""


def damaged(run: RunDir, fault: Damaged) -> LeftOut:
    """The entry of a run with a damaged or missing file."""
    gone = isinstance(fault, Missing) or not run.config_path.is_file()
    state = "missing" if gone else "damaged"
    return LeftOut(run=_name(run), state=state, file=fault.file, fault=fault.fault, remedy=fault.remedy)


def stranger(run: RunDir) -> LeftOut:
    """The entry of a folder that is no run of the sweep that it lies in."""
    return LeftOut(run=_name(run), state="foreign", file=str(run.path), fault="it is not in sweep.json", remedy=MOVE)


def without_result(runs: pd.DataFrame) -> list[LeftOut]:
    """The entries of the rows of Frames.runs that have not finished, and have not diverged either."""
    open_ends = runs[(runs["state"] != "finished") & ~runs["diverged"]]
    return [
        LeftOut(
            run=run.run, state=run.state, file=f"{run.path}/status.json", remedy=GO_ON,
            fault=str(run.reason) if isinstance(run.reason, str) else _progress(run),
        )
        for run in open_ends.itertuples()
    ]  # fmt: skip


def exit_code(left_out: Sequence[LeftOut], partial: bool) -> int:
    """EXIT_FAILED where a run that was expected is left out, else 0; with `partial` only a damaged one counts, and one
    that was trained on other data."""
    counted = [entry for entry in left_out if entry.state in UNFIT or not partial]
    return EXIT_FAILED if counted else 0


def note(left_out: Sequence[LeftOut]) -> list[str]:
    """The sentence of a report on runs that are left out; none without any."""
    if not left_out:
        return []
    more = f"; and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
    runs = f"{len(left_out)} run{'s' * (len(left_out) > 1)}"
    return [f"Left out, {runs}: {'; '.join(entry.line for entry in left_out[:SHOWN])}{more}."]


def rows(left_out: Iterable[LeftOut]) -> list[Mapping[str, Any]]:
    """The entries for --json."""
    return [vars(entry) for entry in left_out]


def _progress(run: Any) -> str:
    return "not started" if pd.isna(run.step) else f"at step {run.step:.0f} of {run.steps:.0f}"


def _name(run: RunDir) -> str:
    return f"{run.sweep}/{run.name}"
