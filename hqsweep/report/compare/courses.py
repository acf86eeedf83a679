"""The gaps of forks over the steps since the fork, and the course of every arm's: what comes at once, and what lasts.

Forks of several ages that end together have these parts from their ages (verdicts.judging), and no course.
"""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from hqsweep.report.compare.families import Family
from hqsweep.report.compare.frames import FORK, FORK_CONSTANT, Frames, common_end
from hqsweep.verdicts.course import NOTHING, Course, course
from hqsweep.verdicts.designs import Forks

KEYS = ["trunk", "seed", "point", "step"]


def growth_rows(metrics: pd.DataFrame, runs: pd.DataFrame, baseline_of: Mapping[str, str]) -> pd.DataFrame:
    """Return arm, trunk, seed, point, step (since the fork), gap (nats) and gap_pct (% of the baseline's loss at that
    step).

    There is a row for each logged train_loss of a fork that its baseline's fork has, too. metrics: run, step, metric,
    value. runs: run, arm, trunk, seed, point. baseline_of: arm -> its baseline.
    """
    losses = metrics.loc[metrics["metric"] == "train_loss", ["run", "step", "value"]]
    losses = losses.merge(runs[["run", "arm", "trunk", "seed", "point"]], on="run")
    losses["step"] -= losses["point"].astype("int64")
    reference = losses.rename(columns={"arm": "baseline", "value": "reference"}).drop(columns="run")
    others = losses[losses["arm"] != losses["arm"].map(baseline_of)]
    pairs = others.assign(baseline=others["arm"].map(baseline_of)).merge(reference, on=["baseline", *KEYS])
    pairs["gap"] = pairs["value"] - pairs["reference"]
    pairs["gap_pct"] = 100 * pairs["gap"] / pairs["reference"]
    rows = pairs[["arm", *KEYS, "gap", "gap_pct"]].sort_values(["arm", *KEYS], ignore_index=True)
    return rows[np.isfinite(rows["gap_pct"])]


def courses(family: Family, frames: Frames, margin: float, maximum: int | None) -> dict[str, tuple[np.ndarray, Course]]:
    """arm -> the steps since the fork [rows] of its curve, and its course over the trunks and points that entered, at
    the constant rate. `margin` in % of the baseline's loss; `maximum` as in families.Rule."""
    if family.design != FORK or family.points.empty or common_end(frames.runs):
        return {}
    runs = frames.runs[frames.runs["arm"].isin([*family.estimates, family.baseline])]
    rows = growth_rows(frames.metrics, runs, dict.fromkeys(runs["arm"], family.baseline))
    rows = rows[rows["step"] <= runs[FORK_CONSTANT].min()]
    entered = family.points[["arm", "trunk", "seed", "point", "draw"]]
    by_arm = dict(iter(rows.merge(entered, on=["arm", "trunk", "seed", "point"]).groupby("arm", sort=False)))
    found = {}
    for arm in family.estimates.keys() & by_arm.keys():
        table = by_arm[arm].pivot_table(index="trunk", columns=["step", "draw"], values="gap_pct", sort=False)
        curves = table.dropna(axis=1).T.groupby("step").mean().T  # of the steps that every fork has
        law = Forks(arms=1 if arm == family.null else family.together, maximum=maximum)
        steps = curves.columns.to_numpy(dtype=float)
        middle = steps - np.diff(steps, prepend=0) / 2 if len(steps) else steps
        if (own := course(curves.to_numpy(), middle, law, margin)) is not None:
            found[arm] = steps, own
    return found


def cells_of(found: Course | None) -> dict[str, object]:
    """The cells of a row of Comparison.arms; without a course those of at_once and growth stay out."""
    lasting = found.lasting if found else NOTHING
    cells = dict(zip(("lasting_pct", "lasting_low", "lasting_high"), lasting, strict=True))
    cells |= {"course": found.end if found else "", "settles_in": found.more if found else math.nan}
    if found is None:
        return cells
    at_once = zip(("at_once_pct", "at_once_low", "at_once_high"), found.at_once, strict=True)
    return cells | dict(at_once) | dict(zip(("growth_pct", "growth_low", "growth_high"), found.slope, strict=True))
