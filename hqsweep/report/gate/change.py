"""How far the arms of a sweep moved since a baseline was stored, paired by replicate.

    D[arm, replicate, point]   loss now minus the mean of the stored draws, in % of the stored loss of the baseline arm
    an arm                     D[arm] - D[baseline arm]: the change of its gap, judged by hqsweep.verdicts as a gap is
    the baseline arm itself    D[baseline arm]: the change of its loss; its own t over replicates

Differences of one replicate share weights, batches and, in a fork study, the whole trunk. Their variance is that of
this sweep's draw and of the stored ones, sigma^2 (1 + 1 / draws), and the spread over replicates measures both: a
lucky stored draw widens the intervals of the sweeps that it is compared with, and weighs less the more are stored.

A control (the baseline arm, the null arm) is judged in a family of its own, so that it takes no power from the arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pandas as pd

from hqsweep.report.compare.frames import FORK
from hqsweep.report.gate.baseline import Baseline, Entries, loss_of
from hqsweep.verdicts import forks, whole_runs
from hqsweep.verdicts.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Family:
    """Arms judged together: the arms under test, their baseline arm, and its null arm, None for none."""

    arms: Sequence[str]
    baseline: str
    null: str | None


def changes(runs: pd.DataFrame, now: Entries, stored: Baseline) -> pd.DataFrame:
    """D in nats, and the stored loss in nats, of every run that is in both: columns arm, trunk, draw, change, stored.
    `runs` are those of Frames.runs."""
    rows = [
        {"arm": run.arm, "trunk": run.trunk, "draw": run.draw, "change": loss_of(now[key]) - old, "stored": old}
        for run in runs.itertuples()
        if (key := (run.arm, int(run.seed), int(run.point))) in now and stored.of(key)
        for old in [fmean(map(loss_of, stored.of(key)))]
    ]
    return pd.DataFrame(rows, columns=["arm", "trunk", "draw", "change", "stored"])


def judge(rows: pd.DataFrame, family: Family, design: str, margin: float) -> dict[str, Estimate]:
    """arm -> the estimate of its change in %, of the arms, the null arm and the baseline; `rows` are those of
    `changes`, margin is in %. An arm that has no replicate in common with the others of its family has no estimate."""
    fork = design == FORK
    controls = [arm for arm in (family.baseline, family.null) if arm is not None]
    arrays = _percent(rows, [*controls, *family.arms], family.baseline, fork)
    if not arrays:
        return {}
    reference = arrays[family.baseline]
    moved = {arm: values - reference for arm, values in arrays.items()} | {family.baseline: reference}
    estimates = forks.judge({arm: moved[arm] for arm in controls}, margin=margin)
    if not family.arms:
        return estimates
    if fork:
        return estimates | forks.judge({arm: moved[arm] for arm in family.arms}, margin=margin)
    means = {arm: values.mean(1) for arm, values in arrays.items()}
    judged = whole_runs.judge(means, baseline=family.baseline, null=family.null, margin=margin)
    return estimates | {arm: judged[arm] for arm in family.arms}


def _percent(rows: pd.DataFrame, arms: Sequence[str], baseline: str, fork: bool) -> dict[str, np.ndarray]:
    """arm -> D in % [replicates, points], at the points that all of `arms` have in every replicate that they share (or
    of the replicates that have every point, where there is no such point); {} for none."""
    table = rows[rows["arm"].isin(arms)].pivot(index=["trunk", "draw"], columns="arm", values=["change", "stored"])
    if set(table.columns.get_level_values("arm")) != set(arms):
        return {}
    table = table.dropna()
    level = table["stored"][baseline]
    percent = 100 * table["change"].div(level if fork else level.mean(), axis=0)
    wide = percent.unstack("draw").reorder_levels(["draw", "arm"], axis=1)
    whole = [draw for draw in wide.columns.unique("draw") if wide[draw].notna().all(axis=None)]
    wide = (wide[whole] if whole else wide.dropna()).swaplevel(axis=1)
    return {arm: wide[arm].to_numpy() for arm in arms} if len(wide) else {}
