"""The arms of a comparison: who is paired with whom, gaps, the null arm's resolution, and what of it can be claimed.

Runs of one seed see the same weights and batches in every arm, so the seed's own level (often ten times larger than
the effect of a format) cancels in the difference. With d_s = L_arm,s - L_baseline,s over the n seeds that finished in
both arms,
    gap = mean(d),  interval = gap -+ t(0.975, n - 1) * sd(d) / sqrt(n)       (Student's t, 95 %)
Losses are natural-log cross entropies in nats, averaged over the trailing window of the run. A run that did not finish,
or whose final loss is NaN or inf, takes part in no gap, and the arm's sentence says so first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hqsweep.errors import UserError, nearest
from hqsweep.report.frames import Frames, config_leaves
from hqsweep.report.gemm_plans import computed_by
from hqsweep.report.paired import holm, interval, intervals, p_value, seeds_needed
from hqsweep.report.verdict import outcome, sentence, state_text

INIT_NOISE = "config.model.init_noise"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison that a report shows.

    arms    one row per arm: arm, baseline, null (whether it is the null arm of its baseline), runs, state, seeds
            (paired), final_loss (mean over finished runs), final_sd, gap, gap_lo, gap_hi, gap_sd (nats), gap_pct,
            gap_pct_lo, gap_pct_hi (of the baseline's mean loss), train_gap, train_lo, train_hi, p (of gap = 0), p_holm
            (corrected over the arms that are neither baseline nor null), resolution (nats: the far end of the null
            arm's interval), target_gap, seeds_needed (for it), overhead_pct, overhead_lo, overhead_hi (tokens to
            loss), loss_spikes_pct, grad_spikes_pct (means over runs), diverged (runs), diverged_at (tokens, of the
            first), tokens_per_s, gemm (the plans that computed its GEMMs), outcome, verdict
    finals  one row per run: the columns of curves.measures, and gap, train_gap, overhead_pct (NaN without a pair)
    """

    frames: Frames
    baseline: str
    baseline_of: dict[str, str]
    window: float
    arms: pd.DataFrame
    finals: pd.DataFrame


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


def paired(rows: pd.DataFrame, value: str, baseline_of: dict[str, str], by: Sequence[str] = ("seed",)) -> pd.Series:
    """rows[value] minus the value of the row of the baseline arm with equal `by` (seed, or seed and step); index as
    `rows`."""
    keys = ["arm", *by]
    reference = rows.set_index(keys)[value]
    partner = rows.assign(arm=rows["arm"].map(baseline_of))[keys]
    other = reference.reindex(pd.MultiIndex.from_frame(partner)).to_numpy()
    return rows[value] - other


def partners(finals: pd.DataFrame, baseline_of: dict[str, str]) -> list[str | None]:
    """For each row of `finals` the run of its baseline arm with the same seed, None where there is none."""
    runs = {(final.arm, final.seed): final.run for final in finals.itertuples()}
    return [runs.get((baseline_of[final.arm], final.seed)) for final in finals.itertuples()]


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
    return intervals(rows.groupby(["arm", "step"])["gap"]).reset_index().rename(columns={"mean": "gap"})


def null_arms(runs: pd.DataFrame, baseline_of: dict[str, str]) -> dict[str, str]:
    """baseline -> its null arm: the arm with init noise whose config has no other difference but the recipe's name."""
    if INIT_NOISE not in runs:
        return {}
    leaves = [name for name in config_leaves(runs) if name not in (INIT_NOISE, "config.recipe.name")]
    first = runs.drop_duplicates("arm").set_index("arm")
    return {
        baseline: arm
        for arm, baseline in baseline_of.items()
        if first.at[arm, INIT_NOISE] > first.at[baseline, INIT_NOISE]
        and first.loc[arm, leaves].equals(first.loc[baseline, leaves])
    }


def arm_row(arm: str, baseline: str, finals: pd.DataFrame, runs: pd.DataFrame, reference: float) -> dict[str, Any]:
    """One row of `Comparison.arms` as far as the arm alone decides it; `finals` and `runs` are this arm's, `reference`
    is the baseline's mean final loss in nats."""
    gaps = finals["gap"].dropna()
    gap, low, high = interval(gaps)
    train_gap, train_low, train_high = interval(finals["train_gap"].dropna())
    overhead, overhead_low, overhead_high = interval(finals["overhead_pct"].dropna())
    return {
        "arm": arm,
        "baseline": baseline,
        "runs": len(runs),
        "state": state_text(runs["state"]),
        "seeds": len(gaps),
        "final_loss": finals["final_loss"].mean(),
        "final_sd": finals["final_loss"].std(),
        "gap": gap,
        "gap_lo": low,
        "gap_hi": high,
        "gap_sd": gaps.std(),
        "gap_pct": 100 * gap / reference,
        "gap_pct_lo": 100 * low / reference,
        "gap_pct_hi": 100 * high / reference,
        "train_gap": train_gap,
        "train_lo": train_low,
        "train_hi": train_high,
        "p": p_value(gaps),
        "overhead_pct": overhead,
        "overhead_lo": overhead_low,
        "overhead_hi": overhead_high,
        "loss_spikes_pct": finals["loss_spikes_pct"].mean(),
        "grad_spikes_pct": finals["grad_spikes_pct"].mean(),
        "diverged": int(finals["diverged_at"].notna().sum()),
        "diverged_at": finals["diverged_at"].min(),
        "tokens_per_s": runs["tokens_per_s"].mean(),
        "gemm": computed_by(runs),
    }


def judge(
    rows: list[dict[str, Any]],
    nulls: dict[str, str],
    finals: pd.DataFrame,
    runs: pd.DataFrame,
    target_gap: float | None,
) -> None:
    """Fill in what depends on the other arms: null, p_holm, resolution, target_gap, seeds_needed, outcome, verdict.

    The resolution is the larger end, in size, of the null arm's 95 % interval. seeds_needed is for `target_gap` nats
    (None: the arm's own gap), with the larger one of the arm's and the null arm's standard deviations.
    """
    null_rows = {row["baseline"]: row for row in rows if nulls.get(row["baseline"]) == row["arm"]}
    claims = {row["arm"]: row["p"] for row in rows if row["arm"] not in (row["baseline"], nulls.get(row["baseline"]))}
    corrected = holm(claims)
    tests = sum(not math.isnan(p) for p in claims.values())
    for row in rows:
        null = null_rows.get(row["baseline"])
        spreads = [sd for sd in (row["gap_sd"], null["gap_sd"] if null else math.nan) if not math.isnan(sd)]
        row["null"] = row is null
        row["resolution"] = max(abs(null["gap_lo"]), abs(null["gap_hi"])) if null else math.nan
        row["p_holm"] = corrected.get(row["arm"], math.nan)
        row["target_gap"] = abs(row["gap"]) if target_gap is None else target_gap
        spread = math.nan if row["arm"] == row["baseline"] else max(spreads, default=math.nan)
        row["seeds_needed"] = seeds_needed(spread, row["target_gap"], tests)
        row["outcome"] = outcome(row)
        without = finals["run"][(finals["arm"] == row["arm"]) & finals["final_loss"].isna()]
        row["verdict"] = sentence(row, runs[runs["run"].isin(without)])
