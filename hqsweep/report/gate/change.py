"""Why the arms of a sweep differ from the stored baseline, and how far they moved since, paired by replicate.

    D[arm, replicate, point]   loss now minus the mean of the stored draws, in % of the stored loss of the baseline arm
    an arm                     D[arm] - D[baseline arm]: the change of its gap, judged by hqsweep.verdicts as a gap is
    the baseline arm itself    D[baseline arm]: the change of its loss; its own t over replicates

Differences of one replicate share weights, batches and, in a fork study, the whole trunk. Their variance has two
parts, this sweep's draw and the stored ones, sigma^2 (1 + 1 / draws), and the spread over replicates measures both: a
lucky stored draw widens the intervals of the sweeps that it is compared with, and weighs less the more are stored.

Where forks of several ages end together, the gap of a trunk is the gap of a whole run (verdicts.judging), as in a
comparison.

A control (the baseline arm, the null arm) is judged in a family of its own, so that it takes no power from the arms.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.recipe.listing import differences
from hqsweep.report.compare.frames import FORK
from hqsweep.report.gate.baseline import EQUAL, Baseline, Description, Entries, Entry, loss_of
from hqsweep.verdicts import judging
from hqsweep.verdicts.estimate import Estimate
from hqsweep.verdicts.judging import weights

SOURCE = "columnwise_source"
Pair = tuple[Entry, Sequence[Entry]]
"""The entry of a run now, and the stored ones of the same arm, seed and point: one for each draw."""


def equal(new: Entry, stored: Sequence[Entry]) -> bool:
    """Whether the curves equal the curves of a draw, bit for bit."""
    return any(new["curve_sha256"] == old["curve_sha256"] for old in stored)


def broken(new: Entry, stored: Sequence[Entry]) -> bool:
    """Whether the curves differ from every draw, though config and machine equal a draw's."""
    return not equal(new, stored) and any(
        new["run_id"] == old["run_id"] and new["fingerprint"] == old["fingerprint"] for old in stored
    )


def difference(pairs: Sequence[Pair], recipe: str = "") -> str:
    """Says that all curves are equal, or what else differs where they are not: the recipe (by the text of
    recipe_changes), the config, the machine or build, or nothing."""
    apart = [(new, stored) for new, stored in pairs if not equal(new, stored)]
    if not apart:
        return EQUAL
    if any(new["run_id"] not in {old["run_id"] for old in stored} for new, stored in apart):
        return f"curves differ, and so does the {f'recipe: {recipe}' if recipe else 'config'}"
    changes = sorted({change for pair in apart for change in _machine_changes(*pair)})
    if not changes:
        return "curves differ on an equal machine and config"
    return f"curves differ, and so does {', '.join(changes)}"


def _machine_changes(new: Entry, stored: Sequence[Entry]) -> list[str]:
    """ "threads 2 -> 1", of the draw whose machine is most like this one."""
    changes = [
        [
            f"{name} {old['fingerprint'].get(name)} -> {new['fingerprint'].get(name)}"
            for name in new["fingerprint"] | old["fingerprint"]
            if new["fingerprint"].get(name) != old["fingerprint"].get(name)
        ]
        for old in stored
    ]
    return min(changes, key=len)


def recipe_changes(old: Description, new: Description) -> str:
    """How a recipe changed, in one line, "" for not at all: "linear.weight columnwise mxfp8 -> mxfp4". Slots that
    changed alike share a clause; grouped linears are named only where they changed otherwise than linears."""
    fields: dict[str, dict[str, list[str]]] = {}
    settings = []
    for row in differences(old, new):
        if row["field"] == SOURCE and None in (row["a"], row["b"]):
            continue  # of a slot that is new, or gone: its formats say so
        change = f"{_text(row['a'])} -> {_text(row['b'])}"
        if row["field"] is None:
            settings.append(f"{row['slot']} {change}")
        else:
            fields.setdefault(change, {}).setdefault(row["slot"], []).append(row["field"])
    clauses: dict[str, list[str]] = {}
    for change, slots in fields.items():
        for slot, names in slots.items():
            alike = slot.replace("grouped_linear.", "linear.")
            if alike == slot or slots.get(alike) != names:
                clauses.setdefault(f"{' and '.join(names)} {change}", []).append(slot)
    return "; ".join([*(f"{', '.join(slots)} {clause}" for clause, slots in clauses.items()), *settings])


def _text(value: Any) -> str:
    return "none" if value is None or isinstance(value, Mapping) else str(value)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Arms judged together: the arms under test, their baseline arm, and its null arm, None for none. end: the step at
    which all forks end, where they do so together: the gaps are then those of whole runs of as many steps."""

    arms: Sequence[str]
    baseline: str
    null: str | None
    end: int | None = None


def changes(runs: pd.DataFrame, now: Entries, stored: Baseline) -> pd.DataFrame:
    """D in nats, and the stored loss in nats, of every run that is in both: columns arm, trunk, draw, change, stored.
    `runs`: rows of Frames.runs."""
    return changes_of(
        ((run.arm, run.trunk, run.draw), loss_of(now[key]) - old, old)
        for run in runs.itertuples()
        if (key := (run.arm, int(run.seed), int(run.point))) in now and stored.of(key)
        for old in [fmean(map(loss_of, stored.of(key)))]
    )


def changes_of(rows: Iterable[tuple[tuple[str, str, str], float, float]]) -> pd.DataFrame:
    """The frame that judge() takes, of ((arm, trunk, draw), change, stored) of every run."""
    flat = [(*key, change, stored) for key, change, stored in rows]
    return pd.DataFrame(flat, columns=["arm", "trunk", "draw", "change", "stored"])


def judge(rows: pd.DataFrame, family: Family, design: str, margin: float) -> dict[str, Estimate]:
    """arm -> the estimate of its change in %, of the arms, the null arm and the baseline; `rows` come from `changes`,
    margin is in %. An arm that has no replicate in common with the others of its family has no estimate."""
    fork = design == FORK
    controls = [arm for arm in (family.baseline, family.null) if arm is not None]
    arrays = _percent(rows, [*controls, *family.arms], family, fork)
    if not arrays:
        return {}
    reference = arrays[family.baseline]
    moved = {arm: values - reference for arm, values in arrays.items()} | {family.baseline: reference}
    estimates = judging.judge_forks({arm: moved[arm] for arm in controls}, margin=margin)
    if not family.arms:
        return estimates
    if fork:
        return estimates | judging.judge_forks({arm: moved[arm] for arm in family.arms}, margin=margin)
    means = {arm: values.mean(1) for arm, values in arrays.items()}
    judged = judging.judge_whole_runs(means, baseline=family.baseline, null=family.null, margin=margin)
    return estimates | {arm: judged[arm] for arm in family.arms}


def _percent(rows: pd.DataFrame, arms: Sequence[str], family: Family, fork: bool) -> dict[str, np.ndarray]:
    """Return arm -> D in % [replicates, points], of a whole run [replicates, 1]; {} for none.

    The points are common to all of `arms` in every replicate that they share. Without such a point, only replicates
    with every point enter.
    """
    table = rows[rows["arm"].isin(arms)].pivot(index=["trunk", "draw"], columns="arm", values=["change", "stored"])
    if set(table.columns.get_level_values("arm")) != set(arms):
        return {}
    table = table.dropna()
    level = table["stored"][family.baseline]
    percent = 100 * table["change"].div(level if fork else level.mean(), axis=0)
    wide = percent.unstack("draw").reorder_levels(["draw", "arm"], axis=1)
    whole = [draw for draw in wide.columns.unique("draw") if wide[draw].notna().all(axis=None)]
    wide = (wide[whole] if whole else wide.dropna()).swaplevel(axis=1)
    if not len(wide):
        return {}
    ages = [family.end - int(draw.split()[0]) for draw in wide[family.baseline]] if family.end else []
    if len(set(ages)) < 2:
        return {arm: wide[arm].to_numpy() for arm in arms}
    whole_run = weights(ages, family.end).whole
    return {arm: (wide[arm].to_numpy() @ whole_run)[:, None] for arm in arms}
