"""`hqsweep run --dry-run`: what the command would do, how long that would take, and everything that it would refuse."""

from collections.abc import Callable, Sequence
from typing import Any

from hqsweep.cli.output import FORK_COLUMNS, GRID_COLUMNS, print_result, rows_table, say


def show(plan: Any, words: Sequence[str], planned: Callable[[list[str]], Any], *, force: bool, as_json: bool) -> None:
    """Print the runs of a plan with their states; UserError after that where they would be refused. Writes nothing.
    planned: the plan of other words."""
    from hqsweep.study.forecast import outlook
    from hqsweep.study.sequential import first_seeds, with_seeds
    from hqsweep.sweep.engine import launch

    ahead = outlook(plan, plan.rows(), force=force)
    columns = FORK_COLUMNS if plan.study.fork else GRID_COLUMNS
    lines = [*plan.lines, _time(ahead)]
    for line in plan.same if as_json else ():
        say(line, err=True)
    print_result(as_json, list(ahead.rows), rows_table(plan.heading, list(ahead.rows), columns), *lines)
    launch.check(plan)
    if plan.study.seeds.until == "decided":
        first_seeds(plan, lambda seeds: planned(with_seeds(words, seeds)))


def _time(ahead: Any) -> str:
    """A text such as: 8 to do, about 5 minutes (by the finished runs of this sweep)."""
    if not ahead.to_do:
        return "all finished; --force repeats them"
    if ahead.minutes is None:
        return f"{ahead.to_do} to do, minutes unknown: {ahead.basis}"
    low, high = f"{ahead.minutes:,.0f}", f"{ahead.most:,.0f}"
    minutes = f"about {low} minutes" if low == high else f"about {low} to {high} minutes"
    minutes = "less than a minute" if ahead.most < 1 else minutes
    return f"{ahead.to_do} to do, {minutes} ({ahead.basis})"
