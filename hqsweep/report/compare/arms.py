"""The arms of a comparison: which runs are paired, and one row per arm with its gap, its verdict and its cost.

Runs of one seed (or forks of one trunk at one point) see the same weights and batches in every arm, so that the level
of the seed, often ten times larger than the effect of a format, cancels in the difference. hqsweep.verdicts judges the
differences; families chooses the runs. Losses are natural-log cross entropies in nats, gaps of verdicts are in % of the
baseline's loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.errors import UserError, nearest
from hqsweep.report.compare.curves import intervals
from hqsweep.report.compare.effects import Effects
from hqsweep.report.compare.families import Family
from hqsweep.report.compare.frames import DATA, DECIDES, ENERGY, FORK, LOSSES, REPLICATE, Frames, config_leaves
from hqsweep.report.compare.left_out import LeftOut
from hqsweep.report.compare.verdict import FEWEST_TRUNKS, IDENTICAL, sentence, state_text
from hqsweep.report.pages.gemm_plans import computed_by
from hqsweep.verdicts.course import Course
from hqsweep.verdicts.estimate import Estimate

NOISE = ("config.model.init_noise", "config.fork.noise")
"""The keys of the null arm: a perturbation of the weights at the start of a run, and at a fork."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison that a report shows.

    design       "whole run" or "fork"
    margin_pct   the largest gap that counts as none, in % of the baseline's loss
    margin_tokens  the same in % of tokens, where it is stated so; NaN elsewhere
    maximum      replicates up to which a sequential study looks after each; None for a study of a fixed size
    estimates    arm -> the estimate that decides, in % of the baseline's loss; the baseline, and arms without a
                 verdict of their own, have none
    points       families.Family.points of all arms
    baseline_why why the baseline is that arm, in words
    notes        sentences about the study as a whole: what entered, what it covers, what it does not see
    arms         one row per arm, the baseline first: arm, baseline, null (whether it is the null arm of its baseline),
                 design, runs, state, verdict (one of verdicts.estimate.VERDICTS; baseline; or, of an arm that is no
                 part of the family: identical, diverged, failed, unfinished, waiting (for seeds that other arms have
                 finished), unpaired), identical (why it is the baseline again, "" where it is not), sentence,
                 final_loss (mean val_loss of finished runs), final_sd, n (seeds or trunks that entered), gap (nats),
                 gap_pct, ci_low_pct, ci_high_pct, half_pct (half of that interval), eq_low_pct, eq_high_pct, p,
                 margin_pct, within_margin, needed (replicates in all), more (beyond n; both NaN of a null arm with an
                 interval, which is there to
                 check the machinery, not to be decided), replicate_minutes, needed_minutes, maximum, val_gap_pct,
                 val_low_pct, val_high_pct, train_gap_pct, train_low_pct, train_high_pct (of both losses; one of them
                 decides), these_low_pct, these_high_pct (these forks alone), correlation (of the arm's losses with the
                 baseline's, over seeds), slowdown_pct, slowdown_low, slowdown_high (95 %, joint), slowdown_eq_low,
                 slowdown_eq_high (90 %) (verdicts.course.slowdown: % of tokens more for the baseline's loss), steps (of
                 a run, or of a fork since its trunk; NaN where these differ), end (the step at which forks of several
                 ages end together, NaN elsewhere: gap and slowdown are then those of a whole run of as many steps, and
                 at_once_pct, at_once_low, at_once_high, growth_pct, growth_low, growth_high the parts of the gap, see
                 families.Family.parts), course (of other forks: flat, closing, growing, open, or "" where it is not
                 known; then at_once has the gap of the first row after the fork and growth the slope of the end, and
                 lasting_pct, lasting_low, lasting_high are the part that lasts and settles_in the steps after which
                 an end that closes would be flat, see verdicts.course.Course),
                 margin_tokens (% of tokens, NaN where the margin is stated as a part of the
                 loss), slope (nats a doubling of tokens takes off the baseline's train_loss),
                 baseline_loss (nats, of the loss that decides), loss_spikes_pct, grad_spikes_pct (means over runs),
                 diverged (runs), diverged_at (tokens, of the first), tokens_per_s, joules_per_token (of GPUs; NaN where
                 not measured), gemm (the plans that computed its GEMMs), pairs and paired_gap (runs paired with the
                 baseline's, and the mean gap in nats of them all),
                 null_in_doubt (whether the null arm is not shown equal, and can be as far off as the gap)
    finals       one row per run: the columns of curves.measures, and gap (of the loss that decides) to the baseline's
                 run of the same replicate (NaN without one)
    trunks       the trunks' own rows, of forks
    left_out     runs without a result, and those that cannot be believed
    courses      arm -> steps since the fork, and its verdicts.course.Course
    effects      of a factorial study
    """

    frames: Frames
    baseline: str
    baseline_of: dict[str, str]
    window: float
    arms: pd.DataFrame
    finals: pd.DataFrame
    design: str
    margin_pct: float
    margin_tokens: float
    maximum: int | None
    estimates: dict[str, Estimate]
    points: pd.DataFrame
    trunks: Frames
    notes: tuple[str, ...] = field(default=())
    left_out: tuple[LeftOut, ...] = field(default=())
    baseline_why: str = ""
    courses: dict[str, tuple[np.ndarray, Course]] = field(default_factory=dict)
    effects: Effects = field(default_factory=Effects)


def baselines(runs: pd.DataFrame, baseline: str) -> dict[str, str]:
    """arm -> the arm it is compared with. The name of a recipe, or the beginning of labels, stands for its arm at the
    same other swept values: with baseline bf16, nvfp4_lr-0.002 is paired with bf16_lr-0.002. Raises UserError when no
    arm has such a name."""
    recipe_of = dict(zip(runs["arm"], runs["recipe"], strict=True))
    if baseline in recipe_of:
        return dict.fromkeys(recipe_of, baseline)
    ours = [arm for arm, recipe in recipe_of.items() if recipe == baseline]
    ours = ours or [arm for arm in recipe_of if arm.startswith(f"{baseline}_")]
    if not ours:
        known = ", ".join(f"'{arm}'" for arm in recipe_of)
        raise UserError(f"baseline: no arm is called '{baseline}'{nearest(baseline, recipe_of)}; the arms are {known}")
    paired = dict.fromkeys(recipe_of)
    for settings in (_settings(runs, DATA), _settings(runs)):  # on the same data, if there is one
        for arm in (arm for arm, other in paired.items() if other is None):
            paired[arm] = _partner(arm, baseline + arm.removeprefix(recipe_of[arm]), ours, settings)
    alone = [arm for arm, other in paired.items() if other is None]
    if alone:
        raise UserError(
            f"baseline: '{baseline}' has no run with the other values of '{alone[0]}'; give one of the arms by its"
            f" whole label: {', '.join(repr(arm) for arm in recipe_of)}"
        )
    return paired


def _partner(arm: str, named: str, ours: Sequence[str], settings: dict[str, tuple[str, ...]]) -> str | None:
    """The arm of the baseline with the settings of this one: the one of the same label (`named`), else the one with the
    shortest label, in which no field of the recipe is changed. None without one."""
    same = [other for other in ours if settings[other] == settings[arm]]
    if named in same and named != arm:
        return named
    return min([*([named] if named in same else []), *same], key=len, default=named if named in ours else None)


def _settings(runs: pd.DataFrame, *more: str) -> dict[str, tuple[str, ...]]:
    """Arm -> the values of its config outside its recipe, without noise, and of the columns `more`."""
    leaves = [name for name in config_leaves(runs) if name not in NOISE and not name.startswith("config.recipe.")]
    leaves += more
    first = runs.drop_duplicates("arm").set_index("arm")[leaves]
    return {
        arm: tuple(map(str, values)) for arm, values in zip(first.index, first.itertuples(index=False), strict=True)
    }


def paired(rows: pd.DataFrame, value: str, baseline_of: dict[str, str], by: Sequence[str] = REPLICATE) -> pd.Series:
    """rows[value] minus the value of the row of the baseline arm with equal `by` (the replicate and point, and for
    curves the step too); index as `rows`."""
    keys = ["arm", *by]
    reference = rows.set_index(keys)[value]
    partner = rows.assign(arm=rows["arm"].map(baseline_of))[keys]
    other = reference.reindex(pd.MultiIndex.from_frame(partner)).to_numpy()
    return rows[value] - other


def gap_curve(comparison: Comparison, metric: str, smooth: int = 1) -> pd.DataFrame:
    """arm, step, gap (nats), low, high, n: the paired gap of `metric` at every step that both arms have; each run's gap
    is a rolling mean over `smooth` rows. The interval is the arm's own, 95 % over n seeds.

    Forks: step counts from the fork (1 is its first), gaps are averaged within a trunk, and n counts trunks. An arm
    with finished runs shows only those; the baseline itself is left out.
    """
    rows, finals = comparison.frames.metrics, comparison.finals
    done = finals["final_loss"].notna()
    shown = finals["run"][done | ~finals["arm"].isin(set(finals["arm"][done]))]
    rows = rows[(rows["metric"] == metric) & rows["run"].isin(shown)].sort_values(["run", "step"])
    rows = rows.drop(columns="seed").join(finals.set_index("run")[[*REPLICATE]], on="run")
    rows = rows.assign(gap=paired(rows, "value", comparison.baseline_of, by=(*REPLICATE, "step"))).dropna(subset="gap")
    rows = rows[rows["arm"] != rows["arm"].map(comparison.baseline_of)]
    rows["gap"] = rows.groupby("run")["gap"].transform(lambda gaps: gaps.rolling(smooth, min_periods=1).mean())
    rows["step"] -= rows["point"]
    means = rows.groupby(["arm", "step", "trunk"])["gap"].mean()
    return intervals(means.groupby(["arm", "step"])).reset_index().rename(columns={"mean": "gap"})


def null_arms(runs: pd.DataFrame, baseline_of: dict[str, str]) -> dict[str, str]:
    """baseline -> its null arm: the arm with noise in its weights whose config differs in nothing else but the recipe's
    name; of several the one with the least noise."""
    noise = [name for name in NOISE if name in runs]
    leaves = [name for name in config_leaves(runs) if name not in (*NOISE, "config.recipe.name")]
    first = runs.drop_duplicates("arm").set_index("arm")
    loud = first[noise].astype("float64").fillna(0).sum(axis=1) if noise else pd.Series(0.0, first.index)
    nulls = {}
    for arm in loud.sort_values(ascending=False, kind="stable").index:
        baseline = baseline_of[arm]
        if loud[arm] > loud[baseline] and first.loc[arm, leaves].equals(first.loc[baseline, leaves]):
            nulls[baseline] = arm
    return nulls


def perturbed(runs: pd.DataFrame, baseline_of: dict[str, str]) -> dict[str, str]:
    """Return, for each baseline that is itself judged against another arm, what sets them apart: a key of NOISE."""
    first = runs.drop_duplicates("arm").set_index("arm")
    found = {}
    for arm in dict.fromkeys(baseline_of.values()):
        other = baseline_of[arm]
        keys = [name for name in NOISE if name in first and first.at[arm, name] != first.at[other, name]]
        if other != arm and keys:
            found[arm] = f"differs from '{other}' by {keys[0].removeprefix('config.')} and is judged against it"
    return found


def arm_row(
    arm: str, family: Family, finals: pd.DataFrame, runs: pd.DataFrame, study: dict[str, Any], no_baseline: str
) -> dict[str, Any]:
    """Return one row of `Comparison.arms`; `finals` and `runs` are this arm's.

    study: the cells that all arms have alike. no_baseline: as in verdict.sentence().
    """
    pairs = finals["gap"].dropna()
    row = {
        "arm": arm,
        "baseline": family.baseline,
        "null": arm == family.null,
        **study,
        "runs": len(runs),
        "state": state_text(runs["state"]),
        **estimated(arm, family),
        "final_loss": finals["final_loss"].mean(),
        "final_sd": finals["final_loss"].std(),
        "loss_spikes_pct": finals["loss_spikes_pct"].mean(),
        "grad_spikes_pct": finals["grad_spikes_pct"].mean(),
        "diverged": int(finals["diverged_at"].notna().sum()),
        "diverged_at": finals["diverged_at"].min(),
        "tokens_per_s": runs["tokens_per_s"].mean(),
        "joules_per_token": runs[ENERGY].mean() if ENERGY in runs else math.nan,
        "gemm": computed_by(runs),
        "pairs": len(pairs),
        "paired_gap": pairs.mean(),
    }
    if row["verdict"] == IDENTICAL:
        loss = finals.loc[pairs.index, LOSSES[DECIDES[row["design"]]]].mean()
        row |= {"n": finals.loc[pairs.index, "trunk"].nunique(), "gap": pairs.mean()}
        row["gap_pct"] = 100 * row["gap"] / (loss - row["gap"])
    row["needed_minutes"] = row["more"] * row["replicate_minutes"]
    without = runs["run"].isin(finals["run"][finals["final_loss"].isna()])
    row["sentence"] = sentence(row, runs[without], no_baseline)
    return row


def _beyond(estimate: Estimate, null: Estimate) -> bool:
    """Whether the interval of a gap lies farther from 0 than any value of the null arm's interval."""
    far = max(abs(null.ci_low), abs(null.ci_high))
    return estimate.ci_low > far or estimate.ci_high < -far


def estimated(arm: str, family: Family) -> dict[str, Any]:
    """The cells that come from an arm's estimate, NaN where it has none."""
    estimate, points = family.estimates.get(arm), family.points[family.points["arm"] == arm]
    null = family.estimates.get(family.null)
    least = FEWEST_TRUNKS if family.design == FORK else 2
    tested, needed = estimate is not None and estimate.n >= least, estimate.needed if estimate else math.nan
    if estimate and estimate.n < least and math.isnan(needed):
        needed = float(least)
    if arm == family.null and tested:
        needed = math.nan
    doubt = tested and family.null not in (None, arm) and not (null and (null.within_margin or _beyond(estimate, null)))
    cells = {
        "verdict": "baseline" if arm == family.baseline else family.apart.get(arm) or estimate.verdict,
        "n": estimate.n if estimate else 0,
        "gap": (points["gap"] * points["weight"]).sum() / points["trunk"].nunique() if len(points) else math.nan,
        "gap_pct": estimate.gap if estimate else math.nan,
        "ci_low_pct": estimate.ci_low if estimate else math.nan,
        "ci_high_pct": estimate.ci_high if estimate else math.nan,
        "half_pct": (estimate.ci_high - estimate.ci_low) / 2 if estimate else math.nan,
        "eq_low_pct": estimate.eq_low if estimate else math.nan,
        "eq_high_pct": estimate.eq_high if estimate else math.nan,
        "p": estimate.p if estimate else math.nan,
        "within_margin": bool(estimate and estimate.within_margin),
        "needed": needed,
        "more": needed - estimate.n if estimate else math.nan,
        "null_in_doubt": doubt,
    }
    for loss in LOSSES:
        other = family.of_loss(loss).get(arm)
        low, high = (other.ci_low, other.ci_high) if other else (math.nan, math.nan)
        cells |= {
            f"{loss}_gap_pct": other.gap if other else math.nan,
            f"{loss}_low_pct": low,
            f"{loss}_high_pct": high,
        }
    cells["these_low_pct"], cells["these_high_pct"] = family.these.get(arm, (math.nan, math.nan))
    loss = family.losses.get(arm, family.losses.get(family.baseline, math.nan))
    return cells | {"correlation": family.correlations.get(arm, math.nan), "baseline_loss": loss}
