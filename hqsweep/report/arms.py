"""The statistics of a comparison: final losses, gaps paired by seed, intervals, and one sentence per arm.

Runs of one seed see the same weights and batches in every arm, so the seed's own level (often ten times larger than
the effect of a format) cancels in the difference. With d_s = L_arm,s - L_baseline,s over the n seeds that finished in
both arms,
    gap = mean(d),  interval = gap -+ t(0.975, n - 1) * sd(d) / sqrt(n)       (Student's t, 95 %)
Losses are natural-log cross entropies in nats. A run that did not finish, or whose final loss is NaN or inf, takes
part in no gap, and the arm's sentence says so first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from hqsweep.errors import UserError, nearest
from hqsweep.report.frames import Frames
from hqsweep.report.plans import computed_by

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a report shows.

    arms    one row per arm: arm, baseline, runs, state, seeds (paired), final_loss (mean over finished runs), final_sd,
            gap, gap_lo, gap_hi (nats), gap_pct (of the baseline's loss), train_gap, train_lo, train_hi (trailing
            window), tokens_per_s, gemm (the plans that computed its GEMMs), outcome, verdict
    finals  one row per run: run, arm, seed, state, final_loss, train_loss (trailing mean), gap, train_gap (NaN where
            there is no pair)
    """

    frames: Frames
    baseline: str
    baseline_of: dict[str, str]
    window: float
    arms: pd.DataFrame
    finals: pd.DataFrame


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of the mean's 95 % interval; low and high are NaN for one value, all three for none."""
    values = np.asarray(values, dtype=float)
    if values.size == 0:
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if values.size == 1:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf((1 + LEVEL) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
    return mean, mean - half, mean + half


def baselines(runs: pd.DataFrame, baseline: str) -> dict[str, str]:
    """arm -> the arm it is compared with. A recipe name stands for its arm at the same other swept values: with
    baseline bf16, "nvfp4 train.lr=0.002" is paired with "bf16 train.lr=0.002". Raises UserError when no arm answers
    to `baseline`."""
    recipe_of = dict(zip(runs["arm"], runs["recipe"], strict=True))
    if baseline in recipe_of:
        return dict.fromkeys(recipe_of, baseline)
    if baseline not in recipe_of.values():
        known = ", ".join(f"'{arm}'" for arm in recipe_of)
        raise UserError(f"baseline: no arm is called '{baseline}'{nearest(baseline, recipe_of)}; the arms are {known}")
    paired = {arm: baseline + arm.removeprefix(recipe) for arm, recipe in recipe_of.items()}
    alone = [arm for arm, other in paired.items() if other not in recipe_of]
    if alone:
        raise UserError(
            f"baseline: '{baseline}' has no run with the other values of '{alone[0]}' (wanted '{paired[alone[0]]}'); "
            f"give one of the arms by its whole label: {', '.join(repr(arm) for arm in recipe_of)}"
        )
    return paired


def trailing(rows: pd.DataFrame, window: float) -> pd.DataFrame:
    """Rows of the last `window` steps of each run (window >= 1), or of the last fraction of its steps (window < 1)."""
    last = rows.groupby("run")["step"].transform("max")
    width = window if window >= 1 else (last * window).clip(lower=1)
    return rows[rows["step"] > last - width]


def final_losses(frames: Frames, window: float) -> pd.DataFrame:
    """One row per run: its last val_loss and the mean train_loss of the trailing window; NaN for a run that has not
    finished."""
    finals = frames.runs[["run", "arm", "seed", "state"]].copy()
    loss = {name: rows for name, rows in frames.metrics.groupby("metric")}
    empty = frames.metrics.iloc[:0]
    held_out = loss.get("val_loss", empty).sort_values("step").drop_duplicates("run", keep="last")
    train = trailing(loss.get("train_loss", empty), window)
    finals["final_loss"] = finals["run"].map(held_out.set_index("run")["value"])
    finals["train_loss"] = finals["run"].map(
        train.groupby("run")["value"].agg(lambda values: values.mean(skipna=False))
    )
    finals.loc[finals["state"] != "finished", ["final_loss", "train_loss"]] = math.nan
    return finals.replace({"final_loss": {math.inf: math.nan}, "train_loss": {math.inf: math.nan}})


def paired(rows: pd.DataFrame, value: str, baseline_of: dict[str, str], by: Sequence[str] = ("seed",)) -> pd.Series:
    """rows[value] minus the value of the row of the baseline arm with equal `by` (seed, or seed and step); index as
    `rows`."""
    keys = ["arm", *by]
    reference = rows.set_index(keys)[value]
    partner = rows.assign(arm=rows["arm"].map(baseline_of))[keys]
    other = reference.reindex(pd.MultiIndex.from_frame(partner)).to_numpy()
    return rows[value] - other


def gap_curve(comparison: Comparison, metric: str, smooth: int = 1) -> pd.DataFrame:
    """arm, step, gap, low, high, seeds: the paired gap of `metric` at every step that both arms have; each run's gap
    is a rolling mean over `smooth` rows. An arm with finished runs shows only those; the baseline itself is left
    out."""
    rows, finals = comparison.frames.metrics, comparison.finals
    done = finals["final_loss"].notna()
    shown = finals["run"][done | ~finals["arm"].isin(set(finals["arm"][done]))]
    rows = rows[(rows["metric"] == metric) & rows["run"].isin(shown)].sort_values(["run", "step"])
    rows = rows.assign(gap=paired(rows, "value", comparison.baseline_of, by=("seed", "step"))).dropna(subset="gap")
    rows = rows[rows["arm"] != rows["arm"].map(comparison.baseline_of)]
    rows["gap"] = rows.groupby("run")["gap"].transform(lambda gaps: gaps.rolling(smooth, min_periods=1).mean())
    points = [
        (arm, step, *interval(group), len(group))
        for (arm, step), group in rows.groupby(["arm", "step"], sort=False)["gap"]
    ]
    return pd.DataFrame(points, columns=["arm", "step", "gap", "low", "high", "seeds"]).sort_values(["arm", "step"])


def arm_row(arm: str, baseline: str, finals: pd.DataFrame, runs: pd.DataFrame, reference: float) -> dict[str, object]:
    """One row of `Comparison.arms`; `finals` and `runs` are this arm's, `reference` is the baseline's mean final loss
    in nats."""
    gaps = finals["gap"].dropna()
    gap, low, high = interval(gaps)
    train_gap, train_low, train_high = interval(finals["train_gap"].dropna())
    row: dict[str, object] = {
        "arm": arm, "baseline": baseline, "runs": len(runs), "state": state_text(runs["state"]), "seeds": len(gaps),
        "final_loss": finals["final_loss"].mean(), "final_sd": finals["final_loss"].std(),
        "gap": gap, "gap_lo": low, "gap_hi": high, "gap_pct": 100 * gap / reference,
        "train_gap": train_gap, "train_lo": train_low, "train_hi": train_high,
        "tokens_per_s": runs["tokens_per_s"].mean(), "gemm": computed_by(runs),
    }  # fmt: skip
    without = set(finals["run"][finals["final_loss"].isna()])
    row["outcome"] = outcome(row, len(without))
    row["verdict"] = sentence(row, runs[runs["run"].isin(without)])
    return row


def state_text(states: pd.Series) -> str:
    """ "3 finished", or "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in states.value_counts().items())


def outcome(row: dict, without_final: int) -> str:
    """One word for the arm: baseline, failed, unpaired, one seed, equal, worse, better or unresolved."""
    if without_final == row["runs"]:
        return "failed"
    if row["arm"] == row["baseline"]:
        return "baseline"
    if row["seeds"] == 0:
        return "unpaired"
    if row["seeds"] == 1:
        return "one seed"
    if row["gap_lo"] == row["gap_hi"] == 0:
        return "equal"
    return "worse" if row["gap_lo"] > 0 else "better" if row["gap_hi"] < 0 else "unresolved"


def sentence(row: dict, unfinished: pd.DataFrame) -> str:
    """The verdict in plain words; `unfinished`, the arm's runs without a final loss, come first."""
    faults = [f"seed {run.seed} {fault(run)}" for run in unfinished.itertuples()]
    trouble = f"{len(faults)} of {row['runs']} runs without a result: {'; '.join(faults)}. " if faults else ""
    return trouble + _finding(row)


def fault(run: Any) -> str:
    """Why a run (a row of Frames.runs) has no final loss: "failed (loss is nan at step 37)"."""
    if run.state == "finished":
        return "finished without a finite val_loss"
    return run.state + (f" ({run.reason})" if isinstance(run.reason, str) else "")


def _finding(row: dict) -> str:
    size, seeds = f"{abs(row['gap']):.4f} nats", row["seeds"]
    span = f"95 % interval {row['gap_lo']:+.4f} to {row['gap_hi']:+.4f} over {seeds} seeds"
    side = "above" if row["gap"] > 0 else "below"
    match row["outcome"]:
        case "failed":
            return "No run of this arm has a final loss."
        case "baseline":
            return f"Baseline: final loss {row['final_loss']:.4f} nats."
        case "unpaired":
            return f"No finished seed in common with '{row['baseline']}': no gap."
        case "one seed":
            return f"Ends {size} {side} '{row['baseline']}'; one seed: no interval; add seeds."
        case "equal":
            return f"Equal to '{row['baseline']}' in every digit over {seeds} seeds."
        case "unresolved":
            return f"No difference from '{row['baseline']}' is resolved: gap {row['gap']:+.4f} nats, {span}."
        case verdict:
            return f"{verdict.capitalize()} than '{row['baseline']}' by {size}: {span}."
