"""Studies that grow until they are decided: seeds.until=decided seeds.max=N.

Every arm gets the same replicates (a seed; in a fork study a trunk with its forks). After each one all arms are judged
by the levels of hqsweep.verdicts.levels, under which looking does not raise the rate of false verdicts. Another
replicate is added until every arm has a verdict or N are there. An arm ends early only when it diverges: early losses
say little about late ones. The state of a study is its run folders, so that the same command resumes one that was
stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from hqsweep.config.job import Config
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.compare import compare
from hqsweep.sweep.grid.point import GridPoint, is_trunk
from hqsweep.sweep.store.names import id_in, run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.verdicts.estimate import VERDICTS

FIRST_SEEDS, FIRST_TRUNKS = 2, 3
"""The replicates of the first look: of whole runs, and of forks, which have no verdict about all trunks before."""


class Judged(Protocol):
    """What is read of a comparison: a row for each arm with arm, baseline, verdict and n."""

    @property
    def arms(self) -> pd.DataFrame: ...


class Plan(Protocol):
    """The part of sweep.engine.launch.SweepPlan that is read here."""

    words: tuple[str, ...]
    points: tuple[GridPoint, ...]
    configs: tuple[Config, ...]
    data: tuple[Config, ...]
    study: StudyConfig

    @property
    def first(self) -> Any: ...


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, kw_only=True)
class Look:
    """The verdicts after `replicates` of at most `maximum`: arm -> verdict (or why an arm has none), without the
    baseline; `added` is the seed that came next, None at the last look."""

    replicates: int
    maximum: int
    verdicts: dict[str, str]
    added: int | None

    @property
    def line(self) -> str:
        """A line such as: look 3 of at most 16: mxfp8 equivalent, nvfp4 undecided; adding seed 3."""
        known = ", ".join(f"{arm} {verdict}" for arm, verdict in self.verdicts.items())
        then = "every arm has a verdict" if self.decided else f"no more than {self.maximum} were stated"
        then = f"adding seed {self.added}" if self.added is not None else then
        return f"look {self.replicates} of at most {self.maximum}: {known}; {then}"

    @property
    def decided(self) -> bool:
        return "undecided" not in self.verdicts.values()


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A study that has ended, or that a run's failure or the end of its time stopped: its runs, the looks of this call,
    the last comparison (None where a run failed before the first look), and the failed runs."""

    runs: tuple[RunDir, ...]
    looks: tuple[Look, ...]
    comparison: Any
    failed: tuple[RunDir, ...]


def grow(
    plan: P,
    replan: Callable[[Sequence[int]], P],
    start: Callable[[P, bool], Sequence[RunDir]],
    *,
    say: Callable[[str], None],
    judged: Callable[[list[RunDir]], Judged] = compare,
    force: bool = False,
) -> Growth:
    """Bring the study of `plan` to its end.

    replan  the plan for other seeds
    start   brings the runs of a plan to an end, and repeats finished ones when asked: launch.start. A run that it
            leaves pending, because its time is over, ends this call
    say     takes a line a look
    judged  the comparison of the runs so far
    force   repeat finished runs

    It starts with the seeds of the plan and those that the sweep has, at least FIRST_SEEDS or FIRST_TRUNKS. A run that
    fails, other than by divergence, ends it, and the same call resumes it.

    Raises UserError, before anything starts: for more replicates than seeds.max, in the plan or in the sweep, for fewer
    than a verdict on forks needs, for a trunk that is given, a grid of one arm, and an engine that does not wait for
    its runs.
    """
    maximum = _checked(plan)
    RunStore(Path(plan.first.runs_dir)).mend(plan.first.sweep, say)
    seeds = first_seeds(plan, replan)
    runs: dict[Path, RunDir] = {}
    looks: list[Look] = []
    comparison = None
    due, gone = seeds, set[str]()
    while True:
        batch = _without(replan(due), gone, plan)
        runs |= {run.path: run for run in start(batch, force and not looks)}
        if failed := tuple(run for run in runs.values() if _failed(run)):
            say(f"{len(failed)} of {len(runs)} runs failed, so no more seeds are added: {failed[0].name}")
            break
        comparison = judged(list(runs.values()))
        if any(run.seen()["state"] == "pending" for run in runs.values()):
            break  # the time that the command was given is over
        verdicts = _verdicts(comparison)
        gone |= {arm for arm, verdict in verdicts.items() if verdict not in VERDICTS}
        ends = "undecided" not in verdicts.values() or len(seeds) >= maximum
        due = [] if ends else [max(seeds) + 1]
        looks.append(Look(
            replicates=int(comparison.arms["n"].max()), maximum=maximum, verdicts=verdicts,
            added=None if ends else due[0],
        ))  # fmt: skip
        say(looks[-1].line)
        if ends:
            break
        seeds = [*seeds, *due]
    return Growth(runs=tuple(runs.values()), looks=tuple(looks), comparison=comparison, failed=failed)


def _checked(plan: Plan) -> int:
    """The largest number of replicates that is stated; UserError for a plan that cannot grow."""
    maximum, engine = plan.study.seeds.max, plan.first.engine
    if plan.study.fork and maximum < FIRST_TRUNKS:
        raise UserError(f"seeds.max: {maximum}; a verdict on forks needs {FIRST_TRUNKS} trunks at least")
    if plan.study.fork and plan.study.fork.goes_on:
        raise UserError(
            "seeds.until: decided adds trunks, but fork.trunk names the only one; use seeds.until=fixed and more points"
            " in fork.at, or leave fork.trunk out"
        )
    if len({point.arm for point in plan.points if not is_trunk(point)}) < 2:
        raise UserError("seeds.until: decided, but the grid has one arm and no other to measure; add recipes")
    if engine.kind == "slurm" and engine.slurm.detach:
        raise UserError(
            "engine.slurm.detach: true, but seeds.until=decided adds seeds when it has seen the runs end; leave one out"
        )
    return maximum


def first_seeds(plan: P, replan: Callable[[Sequence[int]], P]) -> list[int]:
    """The plan's seeds, the seeds that the sweep has begun, and as many more as the first look needs. UserError
    for a plan that cannot grow, and for more of them than seeds.max."""
    maximum = _checked(plan)
    store, sweep = RunStore(Path(plan.first.runs_dir)), plan.first.sweep
    begun = {run.name: run for run in store.runs(sweep) if run.seen()["state"] not in ("pending", "missing")}
    candidates = {seed for run in begun.values() if (seed := _seed(run)) is not None}
    seeds = {point.config["seed"] for point in plan.points}
    ids = set(map(id_in, begun))
    if candidates - seeds:
        points = replan(sorted(candidates)).points
        seeds |= {point.config["seed"] for point in points if run_id(point.config)[:10] in ids}
    least = FIRST_TRUNKS if plan.study.fork else FIRST_SEEDS
    while len(seeds) < least:
        seeds.add(max(seeds) + 1)
    if len(seeds) > maximum:
        raise UserError(
            f"seeds.max: {maximum}, but {len(seeds)} replicates are given or there already (seeds"
            f" {', '.join(map(str, sorted(seeds)))}); the largest number is stated beforehand, so give no more"
        )
    return sorted(seeds)


def _seed(run: RunDir) -> int | None:
    """The seed of a run; None where its config is damaged."""
    try:
        return run.config()["seed"]
    except Damaged:
        return None


def _without(batch: P, gone: set[str], plan: P) -> P:
    """The batch without the arms that are gone, under the words by which the study was asked for."""
    pairs = [(p, c) for p, c in zip(batch.points, batch.configs, strict=True) if p.arm not in gone]
    points, configs = zip(*pairs, strict=True)
    return replace(batch, points=points, configs=configs, words=plan.words)


def _failed(run: RunDir) -> bool:
    """Whether the run has failed other than by a loss that diverged, which is a result."""
    status = run.seen()
    return status["state"] not in ("finished", "pending") and not str(status["reason"]).startswith("loss is ")


def _verdicts(comparison: Judged) -> dict[str, str]:
    """Arm -> its verdict, or why it has none."""
    return {row.arm: row.verdict for row in comparison.arms.itertuples() if row.arm != row.baseline}
