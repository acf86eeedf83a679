"""A run to do, and what becomes of a fork whose trunk does not come to its point."""

import time
from dataclasses import dataclass
from pathlib import Path

from hqsweep.sweep.store.run_dir import CANCELLED, RunDir

LOOK_S = 0.25
"""Seconds between two looks at the status, the lock or the trunk of a run."""


@dataclass(kw_only=True, eq=False)
class Task:
    """A run to do.

    reset: delete what it has put out before. trunk: the run of the same sweep that it is a fork of. needs: the file
    that it starts from. ready: whether that is there, or it needs none. name_at: when to say which process keeps it.
    """

    run: RunDir
    reset: bool
    trunk: RunDir | None = None
    needs: Path | None = None
    ready: bool = True
    failures: int = 0
    look_at: float = 0.0
    announced: bool = False
    name_at: float = float("inf")

    @classmethod
    def of(cls, run: RunDir, *, reset: bool) -> "Task":
        needs = run.trunk_state()
        trunk = needs and run.trunk()
        return cls(run=run, reset=reset, trunk=trunk, needs=needs, ready=trunk is None)

    def due(self) -> bool:
        """Whether to look at the run again; counts as the look."""
        if time.monotonic() < self.look_at:
            return False
        self.look_at = time.monotonic() + LOOK_S
        return True

    def make_ready(self) -> None:
        """What it waited for is there."""
        self.ready, self.announced, self.look_at = True, False, 0.0


def end_without(trunk: RunDir) -> tuple[str, str] | None:
    """State and reason of a fork whose trunk has not come to the fork's point; None while somebody trains it."""
    status = trunk.seen()
    state, reason = status["state"], status["reason"]
    if state == "running":
        return None
    if state == "failed":
        return "failed", f"its trunk {trunk.name} failed: {reason}"
    if state in ("missing", "damaged"):
        return "failed", f"its trunk {trunk.name} is {state}: {reason}"
    if state == "finished":
        return "failed", f"its trunk {trunk.name} is finished, and its state at this point is gone; run again"
    if reason == CANCELLED:
        return "interrupted", f"its trunk {trunk.name} was cancelled"
    return "interrupted", f"its trunk {trunk.name} is {state}" + (f": {reason}" if reason else "")
