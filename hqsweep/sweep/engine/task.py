"""A run to do: whether it still starts, why it failed, and the fate of a fork whose trunk does not come to its point.

`hqsweep run --until 20m` gives the time until which runs start. A run starts if it would be finished by then: if the
last comparable run took no longer than the time left. Comparable is a run of as many steps in the same arm, else in
another arm. A run without one starts as long as there is time. Runs at work end, so that none is cut.

The reason of a failure is one line of the run's status: an error's message, memory that ran out, or a kill for memory.
A killed process cannot read how much memory there was. Its parent does.
"""

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

from hqsweep.errors import Damaged, UserError
from hqsweep.host import Memory
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.store.run_dir import CANCELLED, RunDir


class RankFailed(Exception):
    """A rank of a run has ended early; the message says which and why. is_cause: not because it had lost another."""

    def __init__(self, message: str, *, is_cause: bool = True) -> None:
        super().__init__(message)
        self.is_cause = is_cause


ON_GPU = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. (GPU \d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
)
"""The messages of torch's CUDA allocator, since 2.2."""
ON_CPU = re.compile(r"you tried to allocate (\d+) bytes|Unable to allocate ([\d.]+ \w+)")
"""The messages of torch's CPU allocator, and of numpy."""


def reason_of(error: Exception) -> str:
    """One line: the message of an error for people, the known facts where memory ran out, else type and message."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError | Diverged | RankFailed):
        return message
    if gpu := ON_GPU.search(message):
        asked, which, total, free = gpu.groups()
        return f"out of memory: {asked} were asked of {which}, where {free} of {total} were free; {_on_gpu()}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory: {message}; {_on_gpu()}"
    cpu = ON_CPU.search(message)
    if cpu or isinstance(error, MemoryError):
        asked = "" if cpu is None else f": {cpu[2] or f'{int(cpu[1]) / GIB:.1f} GiB'} were asked for at once"
        return f"out of memory{asked}; {ADVICE}"
    return f"{type(error).__name__}: {message}"


def _on_gpu() -> str:
    return ADVICE.replace("engine.workers", "engine.runs_per_gpu")


GIB = 2**30
ADVICE = "give fewer engine.workers, more train.microbatches, or a smaller train.batch or model"


def killed_for_memory(memory: Memory, killed_before: int, peak_bytes: int | None) -> str | None:
    """The reason of a SIGKILL, if the kernel has killed for memory since `killed_before`; None otherwise.

    peak_bytes: the largest resident size of the process, where it is known."""
    if memory.kills() <= killed_before:
        return None
    limit = memory.limit()
    there = f"{limit[0]} has {limit[1] / GIB:.1f} GiB" if limit else "its limit is unknown"
    own = "" if peak_bytes is None else f", the run's process had {peak_bytes / GIB:.1f} GiB"
    return f"killed for memory: {there}{own}; {ADVICE}"


UNITS = {"s": 1, "m": 60, "h": 3600}
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")


def seconds_of(text: str, name: str) -> float:
    """The seconds of 90s, 20m, 2h or 1h30m. UserError, which begins with `name`, for any other text and for none."""
    parts = DURATION.findall(text) if isinstance(text, str) else []
    seconds = sum(float(count) * UNITS[unit] for count, unit in parts)
    if not parts or "".join(count + unit for count, unit in parts) != text or not 0 < seconds < math.inf:
        raise UserError(f"{name}: got {text!r}; it takes a time above 0 with its unit, such as 90s, 20m, 2h or 1h30m")
    return seconds


class Until:
    """The time until which runs start, which begins to pass when this is made, and what runs took."""

    def __init__(self, text: str, name: str = "--until") -> None:
        self.name = name
        self._end = time.monotonic() + seconds_of(text, name)
        self._took: dict[tuple[object, ...], float] = {}

    @property
    def left(self) -> float:
        """The seconds that are left, 0 at least."""
        return max(0.0, self._end - time.monotonic())

    def learn(self, run: RunDir, seconds: float) -> None:
        """Take note of the seconds that a whole run took."""
        if seconds > 0 and (kind := _kind(run)) is not None:
            self._took[kind] = self._took[kind[:2]] = seconds

    def expected(self, run: RunDir) -> float | None:
        """The seconds that a run still needs; None without a comparable one."""
        kind = _kind(run)
        whole = None if kind is None else self._took.get(kind, self._took.get(kind[:2]))
        return None if whole is None else whole * (1 - _done(run))

    def allows(self, run: RunDir) -> bool:
        """Whether the run may start now."""
        left = self.left
        return left > 0 and (self.expected(run) or 0.0) <= left

    def line(self, late: list[RunDir]) -> str:
        """The sentence on runs that were not started."""
        said = f"{self.name}: {len(late)} run{'s are' if len(late) > 1 else ' is'} not started"
        needs = {run: seconds for run in late if (seconds := self.expected(run)) is not None}
        if not self.left or not needs:
            return f"{said}, as the time is over"
        first = min(needs, key=needs.get)
        return f"{said}: {first.name} would take about {needs[first]:.0f} s, and {self.left:.0f} s are left"


def _kind(run: RunDir) -> tuple[object, ...] | None:
    """(whether the run is a trunk, its own steps, its arm); None where its documents are damaged."""
    try:
        config, fork, arm = run.config(), run.fork(), run.manifest().get("arm")
    except Damaged:
        return None
    steps = fork.last - fork.start if fork else (config.get("train") or {}).get("steps")
    return bool(fork and fork.is_trunk), steps, arm


def _done(run: RunDir) -> float:
    """The part of the run's own steps that an interrupted attempt has done."""
    try:
        progress, fork = run.seen()["progress"], run.fork()
    except Damaged:
        return 0.0
    if not progress:
        return 0.0
    start = fork.start if fork else 0
    return min(1.0, max(0.0, (progress["step"] - start) / max(1, progress["steps"] - start)))


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
    """State and reason of a fork whose trunk is not yet at the fork's point; None while a process trains the trunk."""
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
