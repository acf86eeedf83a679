"""A terminal that shows a running sweep: a live table on a terminal, plain and rare lines anywhere else.

A display gets every status that the engine reads, and decides when to draw it. Losses are in nats, times in seconds,
speed in tokens per second. Names, reasons and configs may come from a folder of somebody else, and an escape sequence
in them could clear the screen, set the clipboard or colour a failure green. So a SafeConsole prints such text as text.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hqsweep.errors import visible


class SafeConsole(Console):
    """rich's Console, but with `visible` text in all that it prints; its own colours and cursor movements stay."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, keep="\n\t"), segment.style)


STYLES = {"pending": "dim", "running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}
STYLES |= {"damaged": "red", "missing": "red"}
OTHERS = ("running", "failed", "interrupted", "damaged", "missing")
"""The states beside finished that are counted."""
MANY = 25
"""The number of runs from which on a sweep prints few lines."""

FOR_TRUNK = "waits for trunk"
STATE_WIDTH = 13
"""The cells of a state and the gaps beside it."""
HEADINGS = ("    loss", "tokens/s", "left, took")
LAYOUTS = ((50, (0, 1, 2)), (36, (0, 1, 2)), (27, (0, 2)), (19, (2,)), (0, ()))
"""(cells beside name and state, HEADINGS that need as many); the first layout has room for a bar, too."""

Status = Mapping[str, Any]


class Display(Protocol):
    """Gets the sweep's statuses from the engine, between enter and exit."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def update(self, run: str, status: Status) -> None:
        """Show the run's status as it is now; the first call for a run names it."""

    def expect(self, steps: Mapping[str, int]) -> None:
        """Take run -> the number of its own steps, where that is known, for the time left of the sweep."""

    def say(self, line: str) -> None:
        """Print one line for the person."""


def open_display(console: Console) -> Display:
    """A live table if `console` is a terminal, plain lines if it is not."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def duration(seconds: float | None) -> str:
    """A time in minutes and seconds, such as 0:07, or with hours, such as 1:02:03; empty for None or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def cells(status: Status) -> tuple[str, str, str]:
    """(loss, speed, time) of a status: time left while it runs, time taken when it has ended; "" where unknown."""
    progress = status["progress"] or {}
    loss, speed = progress.get("loss"), progress.get("tokens_per_s")
    seconds = progress.get("eta_s") if status["state"] == "running" else status["seconds"] or None
    return ("" if loss is None else f"{loss:.4f}", f"{speed:,.0f}" if speed else "", duration(seconds))


def part_done(progress: Mapping[str, Any]) -> float:
    """The part of the work that is done, from 0 to 1."""
    part = progress.get("part")
    return progress["step"] / progress["steps"] if part is None else part


def own_steps(progress: Mapping[str, Any]) -> str:
    """The steps that are done, and all of them, such as 40/200; the steps of a fork begin where it leaves its trunk."""
    first = progress.get("first") or 0
    return f"{progress['step'] - first}/{progress['steps'] - first}"


def how_far(status: Status) -> str:
    """A text such as "step 40/200"; for a job without steps its phase and the part that is done, such as "kernel, 37
    %"."""
    phase, progress = status.get("phase"), status["progress"]
    if phase is None:
        return f"step {own_steps(progress)}"
    return f"{phase}, {100 * part_done(progress):.0f} %" if progress else phase


def counts(statuses: Mapping[str, Status]) -> str:
    """A text such as: 3 of 18 runs finished, 2 running, 1 failed."""
    states = [status["state"] for status in statuses.values()]
    others = [f"{states.count(state)} {state}" for state in OTHERS if state in states]
    return ", ".join([f"{states.count('finished')} of {len(states)} runs finished", *others])


def seconds_left(statuses: Mapping[str, Status], steps: Mapping[str, int], workers: int) -> float | None:
    """Return the seconds until all runs have ended; None if unknown.

    All runs' seconds are divided among `workers`, but it is never less than the longest running run. A run without an
    estimate takes its steps times the other runs' mean seconds of a step. steps: run -> its steps.
    """
    known = {run: left for run, status in statuses.items() if (left := _own_seconds_left(status)) is not None}
    rates = [rate for run, status in statuses.items() if (rate := _step_seconds(status, steps.get(run)))]
    for run, status in statuses.items():
        if status["state"] in ("pending", "running") and run not in known:
            to_do = _steps_left(status, steps.get(run))
            if to_do is None or not rates:
                return None
            known[run] = to_do * sum(rates) / len(rates)
    if not known:
        return None
    return max(sum(known.values()) / max(workers, 1), *known.values())


def _own_seconds_left(status: Status) -> float | None:
    return (status["progress"] or {}).get("eta_s") if status["state"] == "running" else None


def _steps_left(status: Status, own: int | None) -> int | None:
    progress = status["progress"]
    return progress["steps"] - progress["step"] if progress and own is not None else own


def _step_seconds(status: Status, own: int | None) -> float | None:
    """The seconds of a step of a run that has finished, or that says when it will."""
    left, to_do = _own_seconds_left(status), _steps_left(status, own)
    if left and to_do:
        return left / to_do
    return status["seconds"] / own if own and status["state"] == "finished" and status["seconds"] else None


def time_left(seconds: float | None) -> str:
    """A text such as: about 12 min left; "" for None."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return "less than a minute left"
    minutes = seconds / 60
    return f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


def _all(reasons: Mapping[str, str]) -> str:
    """A text such as: waits for trunk-s0 and 3 more."""
    first, *others = dict.fromkeys(reasons.values())
    return f"{first} and {len(others)} more" if others else first


class PlainDisplay:
    """Prints one line when a run changes its state, and one per run every `every_s` seconds of progress, or of waiting
    for its first step. Where there are many runs, their starts are left out."""

    def __init__(self, console: Console, every_s: float = 10.0) -> None:
        self._console, self._every_s = console, every_s
        self._statuses: dict[str, Status] = {}
        self._said_s: defaultdict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.say(counts(self._statuses))

    def update(self, run: str, status: Status) -> None:
        state, before = status["state"], self._statuses.get(run)
        self._statuses[run] = status
        if before is None or state == "pending":
            return
        if state != before["state"]:
            if state != "running" or len(self._statuses) < MANY:
                self.say(self._state_line(run, status))
        elif state == "running" and self._is_due(run, status):
            self.say(self._progress_line(run, status))
        else:
            return
        self._said_s[run] = time.monotonic()

    def expect(self, steps: Mapping[str, int]) -> None:
        """Nothing: a line says the time left of one run."""

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, run: str, status: Status) -> bool:
        return (status["progress"] or status.get("phase")) and time.monotonic() - self._said_s[run] >= self._every_s

    def _state_line(self, run: str, status: Status) -> str:
        if status["state"] == "running":
            return f"{run}: running"
        loss, _, seconds = cells(status)
        parts = [f"{status['state']} after {seconds}" if seconds else status["state"]]
        parts += [f"loss {loss}"] * bool(loss) + [status["reason"]] * bool(status["reason"])
        return f"{run}: {', '.join(parts)} ({counts(self._statuses)})"

    def _progress_line(self, run: str, status: Status) -> str:
        loss, speed, left = cells(status)
        parts = [how_far(status)]
        parts += [f"loss {loss}"] * bool(loss) + [f"{speed} tokens/s"] * bool(speed) + [f"{left} left"] * bool(left)
        return f"{run}: {', '.join(parts)}"


class LiveDisplay:
    """Draws a table in place: the runs that matter now as far as the terminal's height allows, and the counts."""

    def __init__(self, console: Console) -> None:
        self._console, self._statuses = console, dict[str, Status]()
        self._steps, self._workers = dict[str, int](), 0
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, run: str, status: Status) -> None:
        self._statuses[run] = status
        self._workers = max(self._workers, sum(each["state"] == "running" for each in self._statuses.values()))

    def expect(self, steps: Mapping[str, int]) -> None:
        self._steps |= steps

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        waiting, width = self._waiting(), self._console.width
        shown = [(run, self._statuses[run]) for run in self._shown(waiting)]
        groups = Counter(waiting.values())
        trunks = {reason: count for reason, count in groups.items() if reason.startswith(FOR_TRUNK)}
        lines = [(count, reason) for reason, count in groups.items() if reason not in trunks]
        lines += [(sum(trunks.values()), _all({reason: reason for reason in trunks}))] if trunks else []
        counted = [(f"{count} run{'s' * (count > 1)}", reason) for count, reason in lines]
        names = max((len(run) for run, _ in shown), default=3)
        room = width - names - STATE_WIDTH
        columns = next((places for needs, places in LAYOUTS if needs <= room), LAYOUTS[-1][1])
        table = Table(box=None, pad_edge=False)
        names = min(names, width // 2)
        taken = names + STATE_WIDTH + sum(len(HEADINGS[place]) + 2 for place in columns) + 2
        for heading, cells_of in (("run", names), ("state", 11), ("step", max(width - taken, 8))):
            table.add_column(heading, no_wrap=True, overflow="ellipsis", width=cells_of)
        for place in columns:
            table.add_column(HEADINGS[place], justify="right", no_wrap=True, width=len(HEADINGS[place]))
        bar = room >= LAYOUTS[0][0]
        for run, status in shown:
            numbers = cells(status)
            table.add_row(*self._row(run, status, bar), *(numbers[place] for place in columns))
        counted = counted[: max(self._console.height - 4, 0)]
        waits = [Text(f"{count} pending: {reason}", STYLES["pending"], no_wrap=True) for count, reason in counted]
        left = time_left(seconds_left(self._statuses, self._steps, self._workers))
        last = ", ".join(filter(None, (counts(self._statuses), left)))
        return Group(table, *waits, Text(last, style="bold", no_wrap=True, overflow="ellipsis"))

    def _waiting(self) -> dict[str, str]:
        """Return run -> the reason why it waits. These runs share one line; a single run has none."""
        waiting = {run: s["reason"] for run, s in self._statuses.items() if s["state"] == "pending" and s["reason"]}
        return waiting if len(waiting) > 1 else {}

    def _shown(self, waiting: Collection[str]) -> list[str]:
        """All other runs if they fit; else the running, the failed and the last others that fit, in grid order."""
        kinds = {reason.startswith(FOR_TRUNK) or reason for reason in waiting.values()}
        room = max(self._console.height - 4 - len(kinds), 1)
        urgency = dict.fromkeys(OTHERS, 1) | {"running": 0, "finished": 2, "pending": 3}
        others = [run for run in self._statuses if run not in waiting]
        ranked = sorted(others, key=lambda run: urgency[self._statuses[run]["state"]])
        fitting = set(ranked[:room])
        return [run for run in others if run in fitting]

    def _row(self, run: str, status: Status, with_bar: bool) -> list[RenderableType]:
        """Return the cells of a run: name, state, and present work."""
        state, progress = status["state"], status["progress"]
        middle: RenderableType = ""
        phase = status.get("phase") if state in ("pending", "running") else None
        if status["reason"]:
            middle = Text(status["reason"], style=STYLES[state])
        elif progress:
            far = own_steps(progress) if phase is None else how_far(status)
            middle = Text(far)
            if with_bar:
                middle = Table.grid(padding=(0, 1))
                middle.add_row(ProgressBar(total=1.0, completed=part_done(progress), width=14), far)
        elif phase:
            middle = Text(phase, style=STYLES[state])
        return [run, Text(state, style=STYLES[state]), middle]
