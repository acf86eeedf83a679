"""A display that keeps what an engine says and shows."""

from collections.abc import Mapping
from typing import Any


class Shown:
    """lines: what was said; shown: (run, state, reason) of every update; steps: the steps of runs."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.lines: list[str] = []
        self.shown: list[tuple[str, str, str | None]] = []

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, run: str, status: Mapping[str, Any]) -> None:
        self.shown.append((run, status["state"], status["reason"]))

    def expect(self, steps: Mapping[str, int]) -> None:
        self.steps = dict(steps)

    def say(self, line: str) -> None:
        self.lines.append(line)

    @property
    def states(self) -> list[tuple[str, str]]:
        """(run, state) of every update."""
        return [(run, state) for run, state, _ in self.shown]

    @property
    def reasons(self) -> dict[str, str | None]:
        """Run -> the last reason."""
        return {run: reason for run, _, reason in self.shown}

    def order(self, state: str) -> list[str]:
        """Runs in the order in which they came to this state."""
        return list(dict.fromkeys(run for run, shown, _ in self.shown if shown == state))
