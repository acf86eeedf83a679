"""Compare the arms of any set of runs with a baseline arm.

comparison = compare(RunStore(Path("runs")).resolve(["quickstart"]), margin="0.25%")
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.config.study import parse_margin
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.arms import Comparison, arm_row, baselines, null_arms, paired, partners, perturbed
from hqsweep.report.compare.curves import loss_slope, measures, overheads
from hqsweep.report.compare.families import DECIDES, LOSSES, Family, Rule, judge
from hqsweep.report.compare.frames import FORK, Frames, load
from hqsweep.report.compare.identical import IDENTICAL, identical_arms
from hqsweep.report.compare.left_out import note, without_result
from hqsweep.report.compare.left_out import rows as rows_of
from hqsweep.report.compare.notes import alike_notes, rewarm_notes, study_notes
from hqsweep.report.compare.studies import Study, of_one_data, replicate_minutes, study_of
from hqsweep.sweep.store.run_dir import RunDir
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
    margin    the largest gap that counts as none, in % of the baseline's loss: 0.25 or "0.25%". None: what the sweep
              states

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
    finals["overhead_pct"] = np.nan if design == FORK else overheads(frames, finals, partners(finals, baseline_of))
    nulls = null_arms(frames.runs, baseline_of)
    identical, alike = identical_arms(frames, baseline_of, nulls.values())
    rule = Rule(design=design, margin=study.margin, maximum=study.maximum, identical=identical)
    repeated = finals[finals["arm"].isin(nulls.values())]
    null_gaps = paired(finals, LOSSES["val"], baseline_of).loc[repeated.index].dropna()
    rewarm = rewarm_notes(trunks, sorted(frames.runs["point"].unique()), null_gaps.tolist())
    left_out = (*frames.left_out, *without_result(trunks.runs), *without_result(frames.runs))
    groups = finals.groupby(finals["arm"].map(baseline_of), sort=False)
    families = {name: judge(rows, name, nulls.get(name), rule) for name, rows in groups}
    return Comparison(
        frames=frames, baseline=baseline, baseline_why=why, baseline_of=baseline_of, window=window, finals=finals,
        design=design, margin_pct=study.margin, maximum=study.maximum, trunks=trunks,
        arms=_arms(frames, trunks, finals, families, study, identical, perturbed(frames.runs, baseline_of)),
        estimates={arm: own for family in families.values() for arm, own in family.estimates.items()},
        points=pd.concat([family.points for family in families.values()], ignore_index=True),
        notes=(
            *note(left_out), *alike_notes(alike), *study_notes(list(families.values()), frames, finals, study),
            *rewarm,
        ),
        left_out=left_out,
    )  # fmt: skip


def _usual_baseline(runs: pd.DataFrame) -> tuple[str, str]:
    """The baseline where no sweep states one: the name of an arm or recipe, and the reason for it."""
    if "bf16" in {*runs["arm"], *runs["recipe"]}:
        return "bf16", "it is not quantized"
    return runs["recipe"].iloc[0], "the first recipe; --baseline ARM takes another"


def _arms(
    frames: Frames,
    trunks: Frames,
    finals: pd.DataFrame,
    families: dict[str, Family],
    study: Study,
    identical: Mapping[str, str],
    no_baseline: Mapping[str, str],
) -> pd.DataFrame:
    """Return Comparison.arms."""
    family_of = {arm: family for family in families.values() for arm in (*_of(family), family.baseline)}
    common = {
        "design": frames.runs["design"].iloc[0], "margin_pct": study.margin, "maximum": study.maximum or 0,
        "replicate_minutes": replicate_minutes(frames.runs, trunks.runs),
    }  # fmt: skip
    slopes = {name: _slope(frames, trunks, name) for name in families}
    rows = [
        arm_row(
            arm,
            family_of[arm],
            finals[finals["arm"] == arm],
            runs,
            common | {"slope": slopes[family_of[arm].baseline], "identical": identical.get(arm, "")},
            no_baseline.get(family_of[arm].baseline, ""),
        )
        for arm, runs in frames.runs.groupby("arm", sort=False)
    ]
    rows.sort(key=lambda row: row["arm"] != row["baseline"])
    return pd.DataFrame(rows)


def _of(family: Family) -> Sequence[str]:
    return (*family.estimates, *family.apart)


def _slope(frames: Frames, trunks: Frames, baseline: str) -> float:
    """The mean over runs (and points) of the nats that a doubling of tokens takes off train_loss: for the baseline's
    runs at their end, for trunks at the points where they are forked."""
    forked = frames.runs["design"].iloc[0] == FORK
    runs = trunks.runs if forked else frames.runs[frames.runs["arm"] == baseline]
    metrics = trunks.metrics if forked else frames.metrics
    curves = metrics[metrics["run"].isin(runs["run"]) & metrics["metric"].eq("train_loss")].sort_values("step")
    ends = sorted(frames.runs["point"].unique()) if forked else [None]
    slopes = [
        loss_slope(curve["step"].to_numpy(), curve["value"].to_numpy(), curve["step"].max() if end is None else end)
        for _, curve in curves.groupby("run")
        for end in ends
    ]
    known = [slope for slope in slopes if not np.isnan(slope)]
    return float(np.mean(known)) if known else np.nan


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
    return {
        "arms": arms,
        "baselines": [row for row in rows if row["arm"] == row["baseline"]],
        "unit": UNIT,
        "margin": comparison.margin_pct,
        "design": comparison.design,
        "baseline": comparison.baseline,
        "baseline_why": comparison.baseline_why,
        "notes": list(comparison.notes),
        "left_out": rows_of(comparison.left_out),
    }
