"""`hqsweep run --more-steps N`: the longer sweep, whose runs go on from those of the one that was named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hqsweep.cli.output import say, waiting
from hqsweep.errors import UserError


def longer(plan: Any, words: list[str], planned: Callable[[list[str]], Any], more: int, *, dry_run: bool) -> Any:
    """The plan of the longer sweep. Unless it is a dry run, its folders are made, and hold what its runs go on from."""
    from hqsweep.sweep.engine import launch, more_steps
    from hqsweep.sweep.store.run_dir import RunDir
    from hqsweep.sweep.store.store import RunStore

    if plan.study.seeds.until == "decided":
        raise UserError("--more-steps: a study that grows states its steps beforehand; give seeds.until=fixed")
    launch.check_data(plan)
    after = planned(more_steps.longer_words(words, plan.configs, more))
    store, sweep = RunStore(Path(plan.first.runs_dir)), plan.first.sweep
    runs = [RunDir(store.root / sweep / name) for name in store.names(sweep, plan.points)]
    with waiting("looking for checkpoints to go on from"):
        starts = more_steps.starts(runs, plan.configs, after.configs)
    steps = " and ".join(map(str, sorted({start.step for start in starts})))
    say(f"{after.first.sweep}: {launch.counted(len(starts), 'run')} from step {steps} of '{sweep}' on", err=True)
    if not dry_run:
        launch.check(after)
        for start, run in zip(starts, launch.folders(after), strict=True):
            more_steps.seed(start, run)
    return after
