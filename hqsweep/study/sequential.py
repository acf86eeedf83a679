"""Studies that grow until they are decided (seeds.until=decided seeds.max=N), or until every gap is known to the margin
(fork.until=settled fork.max_steps=N).

Every arm gets the same replicates (a seed; in a fork study a trunk with its forks). After each one all arms are judged
by the levels of hqsweep.verdicts.designs, under which looking does not raise the rate of false verdicts. Another
replicate is added until every arm has a verdict or N are there; or until the interval of every arm's gap of a whole run
reaches no further than the margin to either side, or no more trunks fit into the steps. More trunks are added, and no
later end: a gap of longer runs is another gap, and varies more over trunks. An arm ends early only when it diverges:
early losses say little about late ones. The state of a study is its run folders, so that the same command resumes one
that was stopped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from hqsweep.config.job import Config
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.compare import compare
from hqsweep.sweep.grid.arms import GridPoint, is_trunk
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
    baseline; `added` is the seed that came next, None at the last look. half_pct: of a study that goes on until it is
    settled, arm -> half of its interval in %; margin_pct: how large it may be."""

    replicates: int
    maximum: int
    verdicts: dict[str, str]
    added: int | None
    half_pct: dict[str, float] | None = None
    margin_pct: float | None = None

    @property
    def line(self) -> str:
        """A line such as: look 3 of at most 16: mxfp8 equivalent, nvfp4 undecided; adding seed 3."""
        known = ", ".join(f"{arm} {verdict}{self._width(arm)}" for arm, verdict in self.verdicts.items())
        settled = self.half_pct is not None
        known += f"; margin {self.margin_pct:.2g} %" if settled else ""
        then = "every gap is known to the margin" if settled else "every arm has a verdict"
        then = then if self.decided else f"no more than {self.maximum} were stated"
        then = f"adding seed {self.added}" if self.added is not None else then
        return f"look {self.replicates} of at most {self.maximum}: {known}; {then}"

    def _width(self, arm: str) -> str:
        """ " (± 0.21 %)" of an arm whose interval decides when the study ends."""
        half = (self.half_pct or {}).get(arm, math.nan)
        return "" if math.isnan(half) else f" (± {half:.2g} %)"

    @property
    def decided(self) -> bool:
        """Whether no more replicates are asked for."""
        if self.half_pct is None:
            return "undecided" not in self.verdicts.values()
        return all(half <= self.margin_pct for half in self.half_pct.values())


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
        look = Look(
            replicates=int(comparison.arms["n"].max()), maximum=maximum, verdicts=verdicts, added=None,
            **(_widths(comparison) if plan.study.settles else {}),
        )  # fmt: skip
        due = [] if look.decided or len(seeds) >= maximum else [max(seeds) + 1]
        looks.append(replace(look, added=due[0] if due else None))
        say(looks[-1].line)
        if not due:
            break
        seeds = [*seeds, *due]
    return Growth(runs=tuple(runs.values()), looks=tuple(looks), comparison=comparison, failed=failed)


def _widths(comparison: Judged) -> dict[str, Any]:
    """The cells half_pct and margin_pct of a look."""
    judged = comparison.arms[comparison.arms["verdict"].isin(VERDICTS)]
    halves = dict(zip(judged["arm"], judged["half_pct"], strict=True))
    return {"half_pct": halves, "margin_pct": float(judged["margin_pct"].min())}


def _checked(plan: Plan) -> int:
    """The largest number of replicates that is stated; UserError for a plan that cannot grow."""
    maximum, engine = plan.study.seeds.max, plan.first.engine
    key, rule = ("fork.until", "settled") if plan.study.settles else ("seeds.until", "decided")
    if plan.study.fork and maximum < FIRST_TRUNKS:
        raise UserError(f"seeds.max: {maximum}; a verdict on forks needs {FIRST_TRUNKS} trunks at least")
    if plan.study.fork and plan.study.fork.goes_on:
        raise UserError(
            f"{key}: {rule} adds trunks, but fork.trunk names the only one; use {key}=fixed and more points"
            " in fork.at, or leave fork.trunk out"
        )
    if len({point.arm for point in plan.points if not is_trunk(point)}) < 2:
        raise UserError(f"{key}: {rule}, but the grid has one arm and no other to measure; add recipes")
    if engine.kind == "slurm" and engine.slurm.detach:
        raise UserError(
            f"engine.slurm.detach: true, but {key}={rule} adds seeds when it has seen the runs end; leave one out"
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
        stated = f"fork.max_steps: room for {maximum} trunks" if plan.study.settles else f"seeds.max: {maximum}"
        raise UserError(
            f"{stated}, but {len(seeds)} replicates are given or there already (seeds"
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
