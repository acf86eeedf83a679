"""The sentences on a comparison as a whole: the verdict of the study, and notes on the runs that entered, on what its
intervals cover, on what it cannot see, and on the re-warm of a checkpoint.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from hqsweep.config.train import LEARNT_NATS
from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.curves import ENTROPY
from hqsweep.report.compare.families import Family
from hqsweep.report.compare.frames import DATA, FORK, Frames, common_end
from hqsweep.report.compare.studies import Study
from hqsweep.report.compare.verdict import (
    BLIND,
    FEWEST_TRUNKS,
    IDENTICAL,
    TENTHS,
    at_least,
    digits,
    identity,
    margin_text,
)
from hqsweep.verdicts.estimate import VERDICTS

NAMED = 4
"""Arms of one verdict that are named; of more than these the number, the first and the last."""


def headline(comparison: Comparison) -> str:
    """Which arms are equivalent, better, worse and undecided, which have no verdict, and what the null arm says:
    "mxfp8 (+0.9 % tokens, +0.05 %) is equivalent to bf16 within 1 % of the tokens; nvfp4 (+21 % tokens, +1.06 %) is
    worse; the null arm is equivalent, as it must be."."""
    arms = comparison.arms[comparison.arms["arm"] != comparison.arms["baseline"]].sort_values("gap_pct", kind="stable")
    tested, null = arms[~arms["null"]], arms[arms["null"]]
    margin = margin_text({"margin_pct": comparison.margin_pct, "margin_tokens": comparison.margin_tokens})
    inside = tested["within_margin"]
    said = {
        f"equivalent to {comparison.baseline} within {margin}": tested["verdict"] == "equivalent",
        f"better than {comparison.baseline}": (tested["verdict"] == "better") & ~inside,
        f"better, inside the margin of {margin}": (tested["verdict"] == "better") & inside,
        f"worse than {comparison.baseline}": (tested["verdict"] == "worse") & ~inside,
        f"worse, inside the margin of {margin}": (tested["verdict"] == "worse") & inside,
        "undecided": tested["verdict"] == "undecided",
    }
    parts = [_clause(tested[which], f"is {words}", f"are {words}") for words, which in said.items() if which.any()]
    same = tested["verdict"] == IDENTICAL
    for words, rows in tested[same].groupby(tested.apply(identity, axis=1), sort=False):
        parts.append(_clause(rows, f"is {words}", f"are {words}"))
    for why, rows in tested[~same & ~tested["verdict"].isin(VERDICTS)].groupby("verdict", sort=False):
        parts.append(_clause(rows, f"has no verdict ({why})", f"have no verdict ({why})"))
    if arms["null_in_doubt"].any():
        parts.append("the null arm is not shown equivalent, so that the machinery is in doubt")
    elif len(null) and not null["within_margin"].all() and tested["n"].ge(FEWEST_TRUNKS).any():
        far = null[["ci_low_pct", "ci_high_pct"]].abs().to_numpy().max()
        parts.append(f"the null arm is shown within {far:.2g} % alone, so that smaller gaps would be in doubt")
    elif len(null) and null["within_margin"].all():
        parts.append("the null arm is equivalent, as it must be")
    if count := len(comparison.left_out):
        parts.append(f"{count} run{'s are' if count > 1 else ' is'} left out")
    return ("; ".join(parts) or f"No arm stands beside {comparison.baseline}") + "."


def _clause(rows: pd.DataFrame, one: str, several: str) -> str:
    names = [_with_gap(row) for row in rows.itertuples()]
    if len(names) == 1:
        return f"{names[0]} {one}"
    if len(names) > NAMED:
        return f"{len(names)} arms, from {names[0]} to {names[-1]}, {several}"
    return f"{', '.join(names[:-1])} and {names[-1]} {several}"


def _with_gap(row: Any) -> str:
    if pd.isna(row.gap_pct) or row.verdict == IDENTICAL:
        return row.arm
    tokens = f"{row.slowdown_pct:+.{1 if abs(row.slowdown_pct) < TENTHS else 0}f} % tokens, "
    if not math.isfinite(row.slowdown_pct):
        least = at_least(row.slowdown_low, row.slowdown_high)
        tokens = f"at least {least:+.0f} % tokens, " if least else ""
    return f"{row.arm} ({tokens}{row.gap_pct:+.{digits(row.half_pct)}f} %)"


OF_TRAINING = (
    "Gaps are of the training loss over the decay, on the same batches in every arm; final val loss is of validation"
    " data at the end."
)
CODE, TARGET = "manifest.model_code", "config.model.target"
"""Columns of models that a function builds."""
MET = "manifest.nonfinite"
"""The column of the rows of train.nonfinite.Nonfinite.manifest, as JSON."""


def study_notes(families: Sequence[Family], frames: Frames, finals: pd.DataFrame, study: Study) -> tuple[str, ...]:
    """One sentence or two each."""
    notes = []
    for family in families:
        notes += [*family.left_out, *_apart(family), *_null(family)]
    if study.maximum:
        unit = "trunk" if families[0].design == FORK else "seed"
        notes.append(
            f"Looked at after every {unit}, {study.maximum} at most: the 5 % of false claims are of all looks together."
        )
    if families[0].design == FORK:
        notes += [OF_TRAINING, *_coverage(families, common_end(frames.runs)), BLIND]
    notes += [*_untrained(frames.runs, finals), *_repeated(frames.runs), *_unsampled(frames)]
    notes += [*_other_code(frames.runs), *_unknown_data(frames.runs), *_nonfinite(frames.runs)]
    return tuple(dict.fromkeys(notes))


def inside_notes(arms: pd.DataFrame) -> list[str]:
    """The sentence why an arm is worse (or better) and inside the margin, while an arm with a gap as large is
    equivalent; [] where no arm is so. arms: Comparison.arms."""
    tested = arms[~arms["null"] & arms["gap_pct"].notna()].sort_values("gap_pct", key=abs, kind="stable")
    inside = tested[tested["verdict"].isin(["worse", "better"]) & tested["within_margin"]]
    if inside.empty:
        return []
    row = inside.iloc[0]
    twins = tested[(tested["verdict"] == "equivalent") & (tested["gap_pct"].abs() >= abs(row["gap_pct"]))]
    other = (
        f"'{twins.iloc[0]['arm']}' ({_gap_and_ends(twins.iloc[0])}) is equivalent, as its interval includes 0"
        if len(twins)
        else "with 0 in its interval it would be equivalent"
    )
    return [
        f"Intervals decide, not gaps: '{row['arm']}' ({_gap_and_ends(row)}) is {row['verdict']}, as its interval"
        f" excludes 0, and inside the margin, as all of its 90 % interval is; {other}."
    ]


def _gap_and_ends(row: pd.Series) -> str:
    spec = f"+.{digits(row['half_pct'])}f"
    return f"{row['gap_pct']:{spec}} %, 95 % interval {row['ci_low_pct']:{spec}} to {row['ci_high_pct']:{spec}} %"


def alike_notes(groups: Iterable[Sequence[str]]) -> list[str]:
    """A sentence for each group of arms that are identical to each other, and not to the baseline."""
    return [
        f"{', '.join(map(repr, group[:-1]))} and {group[-1]!r} are identical to each other: the same operands, and"
        " equal losses. They are one arm, and count as several; leave all but one out."
        for group in groups
    ]


def _other_code(runs: pd.DataFrame) -> list[str]:
    """Arms of one function's model that are of different code."""
    if CODE not in runs or TARGET not in runs:
        return []
    notes = []
    for target, same in runs.dropna(subset=[CODE]).groupby(TARGET, sort=False):
        first = same[CODE].iloc[0]
        others = list(dict.fromkeys(same["arm"][same[CODE] != first]))
        if others:
            said = ", ".join(f"'{arm}'" for arm in others)
            notes.append(
                f"The code of {target} changed between runs: some of {said} were trained with other code than the first"
                f" run of '{same['arm'].iloc[0]}', so their gaps are not the recipe's alone."
            )
    return notes


def _nonfinite(runs: pd.DataFrame) -> list[str]:
    """Arms whose slots have met NaN or inf, and where that began."""
    if MET not in runs:
        return []
    notes = []
    for arm, own in runs.dropna(subset=[MET]).groupby("arm", sort=False):
        met = [(run, row) for run, rows in zip(own.itertuples(), own[MET].map(json.loads), strict=True) for row in rows]
        if not met:
            continue
        run, first = min(met, key=lambda each: (each[1]["first"], each[1]["order"]))
        slots, silent = len({row["slot"] for _, row in met}), any(row["lost"] for _, row in met)
        more = f", and {slots - 1} more slots" if slots > 1 else ""
        of_runs = f"{len({own.run for own, _ in met})} of {(runs['arm'] == arm).sum()} runs of '{arm}'"
        notes.append(
            f"NaN or inf was quantized in {of_runs}, first, with seed {run.seed}: {first['sentence']}{more}."
            + (" What became a number, or holds a scale, is in no loss but in what was trained." if silent else "")
        )
    return notes


def _unknown_data(runs: pd.DataFrame) -> list[str]:
    """A sentence where nothing says which data the finished runs have read."""
    done = runs[runs["state"] == "finished"]
    if done[DATA].notna().all():
        return []
    return ["It is not known which data these runs have read, as the version that trained them did not write it down."]


def _apart(family: Family) -> list[str]:
    apart = {arm: why for arm, why in family.apart.items() if why != IDENTICAL}
    if not apart:
        return []
    said = ", ".join(f"'{arm}' ({why})" for arm, why in apart.items())
    return [f"No part of the arms that are judged together: {said}."]


def _null(family: Family) -> list[str]:
    if family.null is not None or not family.estimates:
        return []
    return [f"No null arm of '{family.baseline}' checks the machinery; null_arm=true adds one."]


def _coverage(families: Sequence[Family], end: int | None) -> list[str]:
    """What the intervals speak of."""
    notes = []
    for trunks, draws, which in [each for family in families for each in _entered(family)]:
        at = f"the fork point{'s' * (len(draws) > 1)} {' / '.join(draws)}"
        if trunks >= FEWEST_TRUNKS:
            averaged = f", {_how(end)}; the gap at each point is listed" if len(draws) > 1 else ""
            notes.append(f"{which} cover trunks of this model, data and recipe ({trunks} are here), at {at}{averaged}.")
        elif trunks == 1:
            notes.append(f"{which} cover {at} of this one trunk, and say nothing about another seed.")
        else:
            notes.append(f"{which} cover {at} of these two trunks; a verdict about all trunks needs three.")
    return notes


def _how(end: int | None) -> str:
    """How the gaps at the points of a trunk become one."""
    if end is None:
        return "averaged"
    return f"from which a straight line through the gaps against age leads to a whole run of {end} steps"


def _entered(family: Family) -> list[tuple[int, list[str], str]]:
    """(trunks, points, "The intervals of 'mxfp8'") for the arms that were judged over the same ones."""
    same: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for arm, own in family.points.groupby("arm", sort=False):
        same.setdefault((tuple(own["trunk"].unique()), tuple(own["draw"].unique())), []).append(repr(arm))
    return [
        (len(trunks), list(draws), "The intervals" + (f" of {', '.join(arms)}" if len(same) > 1 else ""))
        for (trunks, draws), arms in same.items()
    ]


def barely_trained(runs: pd.DataFrame, finals: pd.DataFrame) -> pd.Series:
    """Whether each run of Comparison.finals ends less than LEARNT_NATS below the unigram entropy of its data; runs: the
    same runs in Frames.runs. False where the entropy is not known."""
    if ENTROPY not in runs:
        return pd.Series(False, finals.index)
    return finals["final_loss"] > runs[ENTROPY].astype(float).set_axis(finals.index) - LEARNT_NATS


def _untrained(runs: pd.DataFrame, finals: pd.DataFrame) -> list[str]:
    """The sentence on runs that have hardly learnt more than how often each token comes."""
    barely = barely_trained(runs, finals)
    if not barely.any():
        return []
    entropy = runs[ENTROPY].astype(float).set_axis(finals.index)
    return [
        f"Barely trained: {barely.sum()} of {len(finals)} runs do not end {LEARNT_NATS:g} nats below the unigram"
        f" entropy of their data ({entropy[barely].min():.3f} nats), which needs no context; gaps of such runs say"
        " little about a trained model. Give more train.steps, or a higher train.lr."
    ]


def _repeated(runs: pd.DataFrame) -> list[str]:
    """Data that was read more than once."""
    epochs = runs["manifest.epochs"].astype(float).max() if "manifest.epochs" in runs else 0.0
    if not epochs > 1:
        return []
    return [
        f"The data repeat: runs read their training tokens up to {epochs:.2f} times, and a gap on what was learned by"
        " heart is not the gap on new text."
    ]


def _unsampled(frames: Frames) -> list[str]:
    """Why there are no panels of quantization errors, and what gives them."""
    every, steps = "config.stats.every", "config.train.steps"
    if len(frames.stats) or every not in frames.runs or steps not in frames.runs:
        return []
    own, apart = int((frames.runs[steps] - frames.runs["point"]).max()), int(frames.runs[every].min())
    why = f"stats.every is {apart}, and a run has {own} steps" if apart else "stats.every is 0"
    return [
        f"No quantization error was sampled ({why}), so the panels of SQNR, underflow and GEMM errors are missing;"
        f" stats.every={max(1, own // 2)} gives them."
    ]


SOURCE_HASH, SOURCE_LOSS = "config.fork.source_hash", "manifest.source_val_loss"
"""The columns of a trunk that begins from a foreign checkpoint: its hash, and its loss before the first step."""
BACK_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far chance lifts the mean loss of the trunks, in nats, and the source of that number."""

    most: float
    of: str


def rewarm_notes(trunks: Frames, points: list[int], null_gaps: Sequence[float] = ()) -> tuple[str, ...]:
    """A sentence for each checkpoint that trunks begin from without an optimizer's state: its loss, the highest loss
    while the rate rises, and whether the trunks are back; and one more where they are not back at one of the `points`
    from which arms fork. Losses are in nats; null_gaps are final val_loss of the null arm's forks minus the baseline's.

    Trunks are back if their mean loss exceeds the checkpoint's by no more than the noise of this study: the one-sided
    upper end t(0.95, df) * se. With several trunks se is sd / sqrt(T), sd pooled over the fork points, and df = (T - 1)
    * points. For one trunk se is the root mean square of the null arm's gaps, and df is their number. Without either,
    the noise is 0.
    """
    if SOURCE_LOSS not in trunks.runs:
        return ()
    begun, notes = trunks.runs.dropna(subset=[SOURCE_LOSS]), []
    for _, runs in begun.groupby(SOURCE_HASH, sort=False):
        loss, first = float(runs[SOURCE_LOSS].mean()), runs.iloc[0]
        curves = _curves(trunks, runs)
        if curves.empty:
            continue
        mean, noise = curves.mean(axis=1), _noise(curves, points, null_gaps)
        peak, name, level = mean.idxmax(), Path(first["config.fork.source"]).name, loss + noise.most
        back = [step for step in mean.index if step >= peak and mean[step] <= level]
        rises = (
            f"rises to {mean[peak]:.4f} at step {peak} and is "
            + (f"back after {back[0]} steps" if back else f"not back after {mean.index[-1]}")
            if mean[peak] > level
            else "never rises"
        )
        notes.append(
            f"Re-warm: val_loss of the checkpoint {name} is {loss:.4f}; over {first['config.fork.warmup']:.0f} steps of"
            f" rising rate it {rises} (mean of {len(runs)} trunk{'s' * (len(runs) > 1)}; back is within"
            f" {100 * noise.most / loss:.2g} %, {noise.of})."
        )
        late = {at: mean[at] / loss - 1 for at in points if at in mean.index and mean[at] > level}
        if late:
            said = ", ".join(f"{100 * excess:.2f} % above it at step {at}" for at, excess in late.items())
            notes.append(
                f"The re-warm has not settled: the trunks are {said}, so the gaps there are those of a model that is"
                " still recovering. Fork later (fork.at), or train at a lower train.lr."
            )
    return tuple(notes)


def _curves(trunks: Frames, runs: pd.DataFrame) -> pd.DataFrame:
    """The validation losses, a column for each trunk, at the steps at which every trunk has one."""
    metrics = trunks.metrics
    rows = metrics[metrics["run"].isin(runs["run"]) & metrics["metric"].eq("val_loss")]
    return rows.pivot_table(index="step", columns="run", values="value", aggfunc="last").dropna()


def _noise(curves: pd.DataFrame, points: list[int], null_gaps: Sequence[float]) -> Noise:
    count, at = curves.shape[1], curves.loc[curves.index.isin(points)]
    if count > 1 and len(at):
        se, df = np.sqrt(at.var(axis=1, ddof=1).mean() / count), (count - 1) * len(at)
        return Noise(
            most=float(t.ppf(BACK_LEVEL, df) * se), of=f"the noise of {count} trunks at {_many(len(at), 'point')}"
        )
    if len(null_gaps):
        se = np.sqrt(np.mean(np.square(null_gaps)))
        most = float(t.ppf(BACK_LEVEL, len(null_gaps)) * se)
        return Noise(most=most, of=f"the noise of {_many(len(null_gaps), 'fork')} of the null arm")
    return Noise(most=0.0, of="as one trunk without a null arm tells of no noise")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
