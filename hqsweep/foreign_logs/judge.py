"""Verdicts on arms of any training, in any metric: hqsweep.verdicts on one value for each run.

Gaps are in % of the baseline's mean where the margin is a part of it, else in the metric's own unit. Whole runs are
blocked by seed, forks by trunk, as hqsweep's own runs are, and give the same verdicts to the digit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.errors import UserError, nearest
from hqsweep.foreign_logs.values import Values, lower_is_better, several
from hqsweep.report.compare.arms import estimated
from hqsweep.report.compare.families import Family, balanced, listed
from hqsweep.report.compare.frames import FORK, WHOLE
from hqsweep.report.compare.verdict import PLAIN, sentence
from hqsweep.verdicts import judging
from hqsweep.verdicts.estimate import VERDICTS, Estimate

MARGIN = "0.25%"
USUAL_BASELINE = "bf16"
MOST_ARMS = 500
NOT_FINITE = "not finite"
"""The state of an arm of which a run ends at nan or inf."""
NOT_HERE = (
    "slowdown_pct", "slowdown_low", "slowdown_high", "margin_tokens", "steps", "end", "at_once_pct", "course",
)  # fmt: skip
"""The cells of a row of Comparison.arms that need the baseline's curve, or ages of forks."""

IN_UNIT = {
    "gap_pct": "gap", "ci_low_pct": "ci_low", "ci_high_pct": "ci_high", "eq_low_pct": "eq_low",
    "eq_high_pct": "eq_high", "margin_pct": "margin",
}  # fmt: skip
"""Columns of Judgement.arms in its unit -> their names for users."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a log.

    baseline  the arm that the others are measured against; None: bf16
    margin    the largest gap that counts as none: a part of the baseline's mean, "0.25%", or a number in the metric's
              unit, "0.002"
    lower     whether lower values are better; None: what the metric's name says
    null_arm  an arm that repeats the baseline: the second control
    maximum   of a study that is looked at after each seed: the most that it has; None: of a fixed one
    """

    metric: str
    baseline: str | None = None
    margin: str | float = MARGIN
    lower: bool | None = None
    null_arm: str | None = None
    maximum: int | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of it.

    unit       "%" (of the baseline's mean) or "plain" (the metric's own)
    design     "whole run" or "fork"
    arms       one row per arm, the baseline first, then by gap: arm, verdict, gap (in the metric's unit), gap_pct,
               ci_low_pct, ci_high_pct, eq_low_pct, eq_high_pct, margin_pct (all in `unit`), p, n, needed, more, mean,
               within_margin, sentence
    estimates  arm -> its estimate, in `unit`
    values     what entered: a row per seed (or trunk and draw), a column per arm
    gaps       arm, replicate (a seed or trunk; a trunk's mean over its points) and gap_pct (in `unit`) of what entered
    runs       arm, replicate, draw, value of all runs of the log
    curves     arm, replicate, draw, step and value, as many as fit a page; empty without steps
    left_out   sentences on runs that do not enter
    """

    metric: str
    lower: bool
    baseline: str
    unit: str
    margin: float
    design: str
    arms: pd.DataFrame
    estimates: Mapping[str, Estimate]
    values: pd.DataFrame
    gaps: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame
    notes: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def of_unit(self) -> str:
        """The unit in words."""
        return "% of the baseline's mean" if self.unit == "%" else self.metric


def judge(values: Values, question: Question, *, forked: bool) -> Judgement:
    """The verdict on every arm; `forked`: replicates are trunks, and draws fork points.

    Raises UserError for a margin that is none, an unknown baseline, no arm beside it, and no common seed.
    """
    lower = lower_is_better(question.metric) if question.lower is None else question.lower
    margin, relative = parse_margin(question.margin)
    design = FORK if forked else WHOLE
    table = _table(values.runs)
    if question.baseline is None and USUAL_BASELINE not in table:
        raise UserError(f"baseline: which arm is it? Name one with --baseline; the arms are {_quoted(table)}")
    baseline = _known(question.baseline or USUAL_BASELINE, table, "baseline")
    null = question.null_arm and _known(question.null_arm, table, "null arm")
    arms = [arm for arm in table if arm != baseline]
    if null == baseline:
        raise UserError(f"null arm: '{null}' is the baseline; it takes an arm that repeats it")
    if not arms:
        raise UserError(f"baseline: '{baseline}' is the only arm; a verdict takes another one beside it")
    apart = {arm: NOT_FINITE for arm in arms if not np.isfinite(values.runs["value"][values.runs["arm"] == arm]).all()}
    together = [arm for arm in arms if arm not in apart]
    full, unpaired = _shared(table[[baseline, *together]].notna(), baseline, together)
    apart |= dict.fromkeys(unpaired, "unpaired")
    judged = [arm for arm in together if arm not in apart]
    entering, out = _entering(full, table[[baseline, *judged]], design) if judged else (full.index[:0], [])
    entered = table.loc[entering, [baseline, *judged]]
    null = null if null in judged else None
    _check_relative(entered[baseline], relative)
    options = {"null": null, "margin": margin, "maximum": question.maximum}
    estimates = _estimates(entered, baseline, design, relative, options) if judged else {}
    if not lower:
        estimates = {arm: replace(each, worse=each.better, better=each.worse) for arm, each in estimates.items()}
    if null and estimates[null].within_margin:
        estimates[null] = replace(estimates[null], worse=False, better=False)
    family = Family(
        design=design, baseline=baseline, null=null, estimates=estimates, beside={}, apart=apart,
        these=_these(entered, baseline, null, relative) if forked and judged else {},
        points=_gaps(entered, baseline, null, design),
    )  # fmt: skip
    unit = "%" if relative else PLAIN
    of_arm = {arm: runs for arm, runs in values.runs.groupby("arm")}
    common = {"margin_pct": margin, "unit": unit, "maximum": question.maximum or 0, **dict.fromkeys(NOT_HERE, math.nan)}
    rows = [_row(arm, family, entered, of_arm[arm], common) for arm in (baseline, *arms)]
    frame = pd.DataFrame(rows).sort_values("gap", kind="stable", key=lambda gaps: gaps if lower else -gaps)
    return Judgement(
        metric=question.metric, lower=lower, baseline=baseline, unit=unit, margin=margin, design=design,
        arms=frame.sort_values("arm", key=lambda names: names != baseline, kind="stable", ignore_index=True),
        estimates=estimates, values=entered, gaps=_singles(family, entered, relative), runs=values.runs,
        curves=values.curves, notes=values.notes, left_out=(*values.left_out, *out),
    )  # fmt: skip


def parse_margin(value: str | float, name: str = "margin") -> tuple[float, bool]:
    """(the margin, whether it is in % of the baseline's mean) of "0.25%" or "0.002"; UserError, which begins with
    `name`, unless it is above 0."""
    text = str(value).strip()
    try:
        number = math.nan if isinstance(value, bool) else float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(
            f"{name}: got {value!r}; it takes a part of the baseline's mean, as in 0.25%, or a number in"
            " the metric's unit, as in 0.002, above 0"
        )
    return number, text.endswith("%")


def _known(arm: str, table: pd.DataFrame, what: str) -> str:
    if arm not in table:
        raise UserError(f"{what}: no arm is called '{arm}'{nearest(arm, table)}; the arms are {_quoted(table)}")
    return arm


def _quoted(arms: Iterable[str]) -> str:
    return several([f"'{arm}'" for arm in arms])


def _table(runs: pd.DataFrame) -> pd.DataFrame:
    """Values with a column for each arm, as arms came, and a row for each trunk (or seed) and draw, by number or
    text."""
    arms = list(dict.fromkeys(runs["arm"]))
    if len(arms) > MOST_ARMS:
        raise UserError(f"{len(arms):,} arms, such as '{arms[0]}'; {MOST_ARMS} at most are judged together")
    renamed = runs.rename(columns={"replicate": "trunk"})
    table = renamed.pivot(index=["trunk", "draw"], columns="arm", values="value").reindex(columns=arms)
    return table.loc[sorted(table.index, key=lambda key: [_order(part) for part in key])]


def _order(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _shared(done: pd.DataFrame, baseline: str, arms: Sequence[str]) -> tuple[pd.Series, list[str]]:
    """(the rows that all arms have, as booleans; the arms that are left out for it). `done` has a column for each arm.

    An arm is left out if it shares no row with the baseline; without a common row, also the arm that shares the fewest,
    until there is one."""
    unpaired = [arm for arm in arms if not (done[arm] & done[baseline]).any()]
    together = [arm for arm in arms if arm not in unpaired]
    while together and not done[[baseline, *together]].all(axis=1).any():
        fewest = min(reversed(together), key=lambda arm: int((done[arm] & done[baseline]).sum()))
        unpaired.append(fewest)
        together.remove(fewest)
    return done[[baseline, *together]].all(axis=1) & bool(together), unpaired


def _entering(full: pd.Series, table: pd.DataFrame, design: str) -> tuple[pd.Index, Sequence[str]]:
    """(the rows that enter, sentences on the others)."""
    if design == FORK:
        return _forks(full)
    said = []
    for (seed, _), row in table[~full].iterrows():
        said.append(f"Seed {seed} has no value in {_quoted(row.index[row.isna()])} and enters no gap.")
    return full.index[full], said


def _forks(full: pd.Series) -> tuple[pd.Index, list[str]]:
    """(the rows of balanced(), sentences on the trunks and points that are not among them)."""
    rows, said = balanced(full, set()), []
    lacking = {
        ("trunk", "trunk"): "lacks forks and enters no gap.",
        ("draw", "point"): "is left out of every trunk, as a fork there has no result.",
    }
    for (level, noun), words in lacking.items():
        there = set(rows.get_level_values(level))
        if out := [value for value in dict.fromkeys(full.index.get_level_values(level)) if value not in there]:
            said.append(f"{listed(noun, out)} {words}")
    return rows, said


def _check_relative(baseline: pd.Series, relative: bool) -> None:
    if relative and len(baseline) and not (baseline.min() > 0 or baseline.max() < 0):
        raise UserError(
            "margin: a part of the baseline's mean says nothing where its values have both signs, or are 0; give a"
            " number in the metric's unit, as in --margin 0.01"
        )


def _estimates(
    table: pd.DataFrame, baseline: str, design: str, relative: bool, options: Mapping[str, Any]
) -> dict[str, Estimate]:
    arms = [arm for arm in table if arm != baseline]
    if design == FORK:
        return judging.judge_forks({arm: _by_trunk(table, arm, baseline, relative) for arm in arms}, **options)
    scaled = 100 * table / abs(table[baseline].mean()) if relative else table
    return judging.judge_whole_runs({arm: scaled[arm].to_numpy() for arm in scaled}, baseline=baseline, **options)


def _by_trunk(table: pd.DataFrame, arm: str, baseline: str, relative: bool) -> np.ndarray:
    """Gaps [trunks, points] of an arm, each in % of the baseline's value there if `relative`."""
    gaps = table[arm] - table[baseline]
    if relative:
        gaps = 100 * gaps.div(table[baseline].abs())
    return gaps.to_numpy().reshape(table.index.get_level_values("trunk").nunique(), -1)


def _these(table: pd.DataFrame, baseline: str, null: str | None, relative: bool) -> dict[str, tuple[float, float]]:
    arms = [arm for arm in table if arm != baseline]
    return judging.these_forks({arm: _by_trunk(table, arm, baseline, relative) for arm in arms}, null=null)


def _gaps(table: pd.DataFrame, baseline: str, null: str | None, design: str) -> pd.DataFrame:
    """Columns arm and gap, in the metric's unit: to the mean of the controls, the null arm's to the baseline. Every row
    counts alike."""
    controls = [baseline] if null is None or design == FORK else [baseline, null]
    mean = table[controls].mean(axis=1)
    gaps = {arm: table[arm] - (table[baseline] if arm == null else mean) for arm in table if arm != baseline}
    rows = [(arm, gap, index, 1.0) for arm, column in gaps.items() for index, gap in enumerate(column)]
    return pd.DataFrame(rows, columns=["arm", "gap", "trunk", "weight"]).astype({"gap": float})


def _singles(family: Family, table: pd.DataFrame, relative: bool) -> pd.DataFrame:
    """Judgement.gaps."""
    gaps = family.points.set_index("trunk")
    index = table.index[gaps.index.to_numpy(dtype=int)]
    if relative:
        level = table[family.baseline].abs()
        level = level.loc[index].to_numpy() if family.design == FORK else level.mean()
        gaps = gaps.assign(gap=100 * gaps["gap"] / level)
    named = gaps.assign(replicate=index.get_level_values("trunk"))
    return named.groupby(["arm", "replicate"], sort=False)["gap"].mean().rename("gap_pct").reset_index()


def _row(
    arm: str, family: Family, entered: pd.DataFrame, runs: pd.DataFrame, common: Mapping[str, Any]
) -> dict[str, Any]:
    """A row of Judgement.arms; `runs` are all of this arm's."""
    row = {
        "arm": arm, "baseline": family.baseline, "null": arm == family.null, "design": family.design,
        "runs": len(runs), "diverged": 0, "replicate_minutes": math.nan, **common, **estimated(arm, family),
        "mean": entered[arm].mean() if arm in entered else runs["value"].mean(skipna=False),
    }  # fmt: skip
    unit = "trunk" if family.design == FORK else "seed"
    broken = runs[~np.isfinite(runs["value"])]
    ends = several([f"{unit} {run.replicate} ends at {run.last:g}" for run in broken.itertuples()])
    if arm == family.baseline:
        count = f"{len(entered)} run{'s' * (len(entered) != 1)}"
        said = f"mean {row['mean']:.6g} over {count}" if len(entered) else "no run enters"
        row["sentence"] = f"Baseline: {said}" + (f"; {ends}, and enters no gap." if ends else ".")
    elif row["verdict"] == NOT_FINITE:
        row["sentence"] = f"No verdict: {ends}."
    else:
        row["sentence"] = sentence(row, runs.iloc[:0])
    return row


def document(judgement: Judgement) -> dict[str, Any]:
    """The judgement for programs: `arms` without the baseline, with gaps in `unit` and `metric_gap` in the metric's."""
    same = ("p", "n", "needed", "more", "within_margin", "mean", "null", "sentence")
    rows = judgement.arms.to_dict("records")
    apart = {row["arm"]: row["verdict"] for row in rows if row["verdict"] not in (*VERDICTS, "baseline")}
    return {
        "arms": [
            {"arm": row["arm"], "verdict": "undecided" if row["arm"] in apart else row["verdict"]}
            | {name: row[source] for source, name in IN_UNIT.items()}
            | {"metric_gap": row["gap"]}
            | {name: row[name] for name in same}
            | {"apart": apart.get(row["arm"])}
            for row in rows[1:]
        ],
        "baseline": judgement.baseline,
        "baseline_mean": rows[0]["mean"],
        "metric": judgement.metric,
        "lower_is_better": judgement.lower,
        "unit": judgement.of_unit,
        "margin": judgement.margin,
        "design": judgement.design,
        "notes": list(judgement.notes),
        "left_out": list(judgement.left_out),
    }  # fmt: skip
