"""What is to be said of a comparison as a whole: which runs entered, what its intervals cover, what it cannot see."""

import json
from collections.abc import Iterable, Sequence

import pandas as pd

from hqsweep.config.train import LEARNT_NATS
from hqsweep.report.compare.curves import ENTROPY
from hqsweep.report.compare.families import Family
from hqsweep.report.compare.frames import DATA, FORK, Frames
from hqsweep.report.compare.identical import IDENTICAL
from hqsweep.report.compare.studies import Study
from hqsweep.report.compare.verdict import BLIND, FEWEST_TRUNKS

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
        notes += [OF_TRAINING, *_coverage(families), BLIND]
    notes += [*_untrained(frames.runs, finals), *_repeated(frames.runs), *_unsampled(frames)]
    notes += [*_other_code(frames.runs), *_unknown_data(frames.runs), *_nonfinite(frames.runs)]
    return tuple(dict.fromkeys(notes))


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


def _coverage(families: Sequence[Family]) -> list[str]:
    """What the intervals speak of."""
    notes = []
    for family in families:
        points = family.points
        if points.empty:
            continue
        trunks, draws = points["trunk"].nunique(), list(dict.fromkeys(points["draw"]))
        at = f"the fork point{'s' * (len(draws) > 1)} {' / '.join(draws)}"
        if trunks >= FEWEST_TRUNKS:
            averaged = ", averaged; the gap at each point is listed" if len(draws) > 1 else ""
            notes.append(
                f"The intervals cover trunks of this model, data and recipe ({trunks} are here), at {at}{averaged}."
            )
        elif trunks == 1:
            notes.append(f"The intervals cover {at} of this one trunk, and say nothing about another seed.")
        else:
            notes.append(f"The intervals cover {at} of these two trunks; a verdict about all trunks needs three.")
    return notes


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
