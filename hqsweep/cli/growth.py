"""What `hqsweep run` does with seeds.until=decided."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hqsweep.cli.output import Shown, say


def grow(
    plan: Any, words: list[str], replan: Callable[[list[str]], Any], *, force: bool, to_stderr: bool
) -> tuple[tuple[Any, ...], dict[str, Any], list[Shown]]:
    """Grow the study of a plan, printing a line a look: (its runs, facts for --json, what to show at the end). `replan`
    makes a plan of words."""
    from hqsweep.report.compare import document
    from hqsweep.report.tables import rich_table
    from hqsweep.study import noise
    from hqsweep.study.sequential import grow, with_seeds
    from hqsweep.sweep import launch
    from hqsweep.sweep.console import SafeConsole
    from hqsweep.sweep.progress import open_display

    display = open_display(SafeConsole(stderr=True))
    growth = grow(
        plan,
        lambda seeds: replan(with_seeds(words, seeds)),
        lambda batch, again: launch.start(batch, display, force=again),
        say=partial(say, err=to_stderr),
        force=force,
    )
    fields = {"looks": [asdict(look) for look in growth.looks]}
    if growth.comparison is None:
        return growth.runs, fields, []
    noise.record(growth.comparison, Path(plan.first.runs_dir))
    return growth.runs, fields | document(growth.comparison), [rich_table(growth.comparison)]
