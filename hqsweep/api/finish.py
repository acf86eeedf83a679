"""A checked plan of a sweep brought to its end, for `hqsweep run` and for Python alike.

What a study that grows needs (pandas, plotly, statistics) is imported for one alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import COMMAND
from hqsweep.sweep.alerts import Alarm, AlertingDisplay, Alerts
from hqsweep.sweep.console import Display
from hqsweep.sweep.store.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The runs of a plan in grid order; of a study that grows (seeds.until=decided, fork.until=settled) also its
    sequential.Growth."""

    runs: tuple[RunDir, ...]
    growth: Any = None

    @property
    def looks(self) -> list[dict[str, Any]]:
        """The looks as plain data."""
        return [asdict(look) for look in self.growth.looks] if self.growth else []


def finish(
    plan: Any,
    replan: Callable[[Sequence[int]], Any],
    display: Display,
    *,
    say: Callable[[str], None],
    look: Callable[[str], None],
    force: bool = False,
    until: Any = None,
) -> Ended:
    """Run all of the plan that is not finished, and grow the study where it says so.

    replan  makes the plan of other seeds
    say     takes lines before a run starts: plan.lines
    look    takes a line a look of a study that grows
    force   repeat finished runs
    until   the sweep.engine.until.Until until which runs start, None for any time

    Raises UserError for a missing part of this machine, as launch.check, before anything starts.
    """
    from hqsweep.sweep.engine import launch
    from hqsweep.track.tracker import upload_line

    launch.check(plan)
    for line in (*plan.lines, upload_line(plan.first.track.model_dump())):
        if line:
            say(line)
    start = partial(launch.start, until=until)
    if plan.study.maximum is None:
        return Ended(runs=tuple(start(plan, display, force=force)))
    from hqsweep.study import noise
    from hqsweep.study.sequential import grow

    of_command = plan.first.job == COMMAND
    judged = {}
    if of_command:
        from hqsweep.foreign_logs.logs import judge_runs

        judged = {"judged": judge_runs}
    growth = grow(
        plan,
        replan,
        lambda batch, again: start(batch, display, force=again),
        say=look,
        force=force,
        **judged,
    )
    if growth.comparison is not None and not of_command:
        noise.record(growth.comparison, Path(plan.first.runs_dir))
    return Ended(runs=growth.runs, growth=growth)


def finish_with(
    alerts: Alerts, plan: Any, replan: Callable[[Sequence[int]], Any], display: Display, **options: Any
) -> Ended:
    """finish(), with alerts for runs that fail meanwhile, and one at the end."""
    if not alerts.any():
        return finish(plan, replan, display, **options)
    folder, alarm = Path(plan.first.runs_dir) / plan.first.sweep, Alarm(alerts=alerts, say=options["say"])
    try:
        watched = AlertingDisplay(display, alarm, lambda name: RunDir(folder / name))
        ended = finish(plan, replan, watched, **options)
        states = [run.seen()["state"] for run in ended.runs]
        verdicts = ended.growth.looks[-1].verdicts if ended.growth and ended.growth.looks else {}
        alarm.ended(plan.first.sweep, f"{states.count('finished')} of {len(states)} runs finished", verdicts)
        return ended
    finally:
        alarm.wait()


def warnings_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each warning of runs, given as launch.result gives them."""
    counts = Counter(line for result in results for line in result["warnings"])
    return [f"warning: {warning} ({count} of {len(results)} runs)" for warning, count in counts.items()]


def after_failures(results: Sequence[dict[str, Any]]) -> str | None:
    """Return advice about runs that did not finish; None if all did.

    A run whose loss diverged would diverge again. A pending run was not started.
    """
    failed = [result for result in results if result["state"] not in ("finished", "pending")]
    others = [result for result in failed if not str(result["reason"]).startswith("loss is ")]
    lines, count = [], len(results)
    if others:
        lines.append(f"{len(others)} of {count} runs did not finish; see {others[0]['path']}/log.txt, then run again")
    if diverged := len(failed) - len(others):
        lines.append(f"{diverged} of {count} runs diverged, and would again; change what the reason names")
    if any(result["state"] == "pending" for result in results):
        done = sum(result["state"] == "finished" for result in results)
        lines.append(f"{done} of {count} runs done; the same command goes on")
    return "; ".join(lines) or None
