"""Compare the arms of any set of runs with a baseline arm.

comparison = compare(RunStore(Path("runs")).resolve(["quickstart"]), margin="0.25%")
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.config.study import margin_in_tokens, parse_margin
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.arms import Comparison, arm_row, baselines, null_arms, paired, perturbed
from hqsweep.report.compare.courses import cells_of as course_cells
from hqsweep.report.compare.courses import courses
from hqsweep.report.compare.curves import measures
from hqsweep.report.compare.effects import effects_of
from hqsweep.report.compare.families import Family, Rule, judge, parts_of
from hqsweep.report.compare.frames import DECIDES, LOSSES, Frames, common_end, load
from hqsweep.report.compare.identical import identical_arms
from hqsweep.report.compare.left_out import note, without_result
from hqsweep.report.compare.left_out import rows as rows_of
from hqsweep.report.compare.notes import alike_notes, inside_notes, rewarm_notes, study_notes
from hqsweep.report.compare.slowdowns import baseline_curves, cells_of, in_loss, slope_notes, slowdowns
from hqsweep.report.compare.studies import of_one_data, replicate_minutes, study_of
from hqsweep.report.compare.verdict import IDENTICAL
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.verdicts.course import Slowdown
from hqsweep.verdicts.estimate import VERDICTS

UNIT = "% of the baseline's loss"
SAID = (*VERDICTS, IDENTICAL)
"""The verdicts of a document."""


def compare(
    run_dirs: Iterable[RunDir], baseline: str | None = None, window: float = 0.1, margin: float | str | None = None
) -> Comparison:
    """Every arm of the convergence runs in `run_dirs`, whole runs or forks, against the arm (or recipe) `baseline`.

    baseline  None: what the sweep states, else bf16, else the first arm's recipe
    window    of whole runs: losses are means over the trailing part, a number of steps or a fraction of the run below
              1, and at least the last value
    margin    the largest gap that counts as none: in % of the baseline's loss (0.25, "0.25%"), or in tokens ("1%
              tokens", at most 1 % more for the same loss). None: what the sweep states

    A sweep that says seeds.until=decided is judged as one that was looked at after every replicate. Runs that are
    missing, damaged or not finished are named in left_out, and no number is taken from them. Raises UserError
    for no convergence run, whole runs beside forks, an unknown baseline, window <= 0, a margin of 0 or over 100 %, and
    sweeps that state different ones. Runs on other data than the baseline's are in left_out, too.
    """
    if not window > 0:
        raise UserError(f"window: {window} steps; give a number of steps (50) or a fraction of the run (0.1)")
    margin = None if margin is None else parse_margin(margin)
    runs = list(run_dirs)
    frames, trunks = load(runs).of_job("convergence").of_design()
    study = study_of(runs, baseline, margin)
    why = "as asked for" if baseline else "the sweep's; --baseline ARM takes another"
    baseline, why = (study.baseline, why) if study.baseline else _usual_baseline(frames.runs)
    try:
        baseline_of = baselines(frames.runs, baseline)
    except UserError as error:
        if not frames.left_out:
            raise
        first = frames.left_out[0]  # which may have been the baseline's
        raise Damaged(first.file, f"{first.fault}, and without it: {error}", first.remedy) from None
    frames, trunks = of_one_data(frames, trunks, baseline_of)
    baseline_of = {arm: baseline_of[arm] for arm in frames.runs["arm"].unique()}
    design = frames.runs["design"].iloc[0]
    finals = measures(frames, window)
    finals["gap"] = paired(finals, LOSSES[DECIDES[design]], baseline_of)
    nulls = null_arms(frames.runs, baseline_of)
    identical, alike = identical_arms(frames, baseline_of, nulls.values())
    curves = baseline_curves(frames, trunks, set(baseline_of.values()))
    margins = {
        name: in_loss(study.margin, name, curves, finals, design) for name in dict.fromkeys(baseline_of.values())
    }
    repeated = finals[finals["arm"].isin(nulls.values())]
    null_gaps = paired(finals, LOSSES["val"], baseline_of).loc[repeated.index].dropna()
    rewarm = rewarm_notes(trunks, sorted(frames.runs["point"].unique()), null_gaps.tolist())
    left_out = (*frames.left_out, *without_result(trunks.runs), *without_result(frames.runs))
    groups = finals.groupby(finals["arm"].map(baseline_of), sort=False)
    end = common_end(frames.runs)
    rule = {"design": design, "maximum": study.maximum, "identical": identical, "end": end}
    families = {name: judge(rows, name, nulls.get(name), Rule(margin=margins[name], **rule)) for name, rows in groups}
    common = {
        "design": design, "maximum": study.maximum or 0, "margin_tokens": margin_in_tokens(study.margin),
        "end": math.nan if end is None else end, "replicate_minutes": replicate_minutes(frames.runs, trunks.runs),
    }  # fmt: skip
    cells = {
        arm: own | {"margin_pct": margins[baseline_of[arm]], "identical": identical.get(arm, "")}
        for arm, own in _cells(families, curves, finals, common).items()
    }
    found = {
        arm: own
        for name, family in families.items()
        for arm, own in courses(family, frames, margins[name], study.maximum).items()
    }
    cells = {arm: own | course_cells(found[arm][1] if arm in found else None) for arm, own in cells.items()}
    arms = _arms(frames, finals, families, cells, perturbed(frames.runs, baseline_of))
    points = pd.concat([family.points for family in families.values()], ignore_index=True)
    effects = effects_of(study.factorial, finals, points, design)
    return Comparison(
        frames=frames, baseline=baseline, baseline_why=why, baseline_of=baseline_of, window=window, finals=finals,
        design=design, margin_pct=float(np.mean([*margins.values()])), maximum=study.maximum, trunks=trunks,
        margin_tokens=margin_in_tokens(study.margin),
        arms=arms,
        estimates={arm: own for family in families.values() for arm, own in family.estimates.items()},
        points=points, effects=effects,
        notes=(
            *note(left_out), *inside_notes(arms), *alike_notes(alike),
            *study_notes(list(families.values()), frames, finals, study),
            *rewarm, *slope_notes(study.margin, curves), *effects.notes,
        ),
        left_out=left_out, courses=found,
    )  # fmt: skip


def _usual_baseline(runs: pd.DataFrame) -> tuple[str, str]:
    """The baseline where no sweep states one: the name of an arm or recipe, and the reason for it."""
    if "bf16" in {*runs["arm"], *runs["recipe"]}:
        return "bf16", "it is not quantized"
    return runs["recipe"].iloc[0], "the first recipe; --baseline ARM takes another"


def _arms(
    frames: Frames,
    finals: pd.DataFrame,
    families: dict[str, Family],
    cells: Mapping[str, Mapping[str, Any]],
    no_baseline: Mapping[str, str],
) -> pd.DataFrame:
    """Return Comparison.arms. cells: of each arm, those that do not come from its estimate."""
    family_of = _family_of(families)
    rows = [
        arm_row(
            arm, family_of[arm], finals[finals["arm"] == arm], runs, cells[arm],
            no_baseline.get(family_of[arm].baseline, ""),
        )
        for arm, runs in frames.runs.groupby("arm", sort=False)
    ]  # fmt: skip
    rows.sort(key=lambda row: row["arm"] != row["baseline"])
    return pd.DataFrame(rows)


def _cells(
    families: dict[str, Family], curves: pd.DataFrame, finals: pd.DataFrame, common: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return, for each arm, `common`, what its baseline's curves say, its slowdown, and the parts of its gap."""
    of_baseline = {
        name: {
            "slope": own["slope"].mean(),
            "steps": own["since"].mean() if own["since"].nunique() == 1 else math.nan,
        }
        for name, own in curves.groupby("arm")
    }
    found = {arm: one for family in families.values() for arm, one in slowdowns(family, curves, finals).items()}
    return {
        arm: common | of_baseline[family.baseline] | cells_of(found.get(arm, Slowdown())) | parts_of(family, arm)
        for arm, family in _family_of(families).items()
    }


def _family_of(families: dict[str, Family]) -> dict[str, Family]:
    return {arm: family for family in families.values() for arm in (*_of(family), family.baseline)}


def _of(family: Family) -> Sequence[str]:
    return (*family.estimates, *family.apart)


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs: `arms` without the baseline, each with a verdict of SAID, gaps in `unit`. Any other
    arm that is not in its family is undecided, and `apart` says why."""
    rows = json.loads(comparison.arms.to_json(orient="records", double_precision=15))
    names = {"gap": "gap_pct", "ci_low": "ci_low_pct", "ci_high": "ci_high_pct", "eq_low": "eq_low_pct",
             "eq_high": "eq_high_pct", "margin": "margin_pct", "gap_nats": "gap"}  # fmt: skip
    arms = [
        {"arm": row["arm"], "verdict": row["verdict"] if row["verdict"] in SAID else "undecided"}
        | {name: row[source] for name, source in names.items()}
        | {"apart": None if row["verdict"] in SAID else row["verdict"]}
        | {name: value for name, value in row.items() if name not in {"verdict", *names, *names.values()}}
        for row in rows
        if row["arm"] != row["baseline"]
    ]
    effects = json.loads(comparison.effects.table.to_json(orient="records", double_precision=15))
    return ({"effects": effects} if effects else {}) | {
        "arms": arms,
        "baselines": [row for row in rows if row["arm"] == row["baseline"]],
        "unit": UNIT,
        "margin": comparison.margin_pct,
        "margin_tokens": None if np.isnan(comparison.margin_tokens) else comparison.margin_tokens,
        "design": comparison.design,
        "baseline": comparison.baseline,
        "baseline_why": comparison.baseline_why,
        "notes": list(comparison.notes),
        "left_out": rows_of(comparison.left_out),
    }
