"""A ladder of sweeps, one size of a model each: the gaps that were measured, and those to expect at a larger size."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.errors import UserError
from hqsweep.jobs.gaussian import expected_gaps, gaussian_error
from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.curves import tokens_per_step
from hqsweep.report.compare.frames import DECIDES, FORK, FORK_CONSTANT, FORK_DECAY, LOSSES, WHOLE
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.verdicts.ladder import FEWEST, HeldOut, Prediction, Rung, hold_out, predict, warnings

BEYOND = 3.0
"""The size that is predicted where none is asked for, over the largest one."""
POINTS = 13
"""Sizes of a drawn line."""
DESIGNS = {"fork": FORK, "whole": WHOLE}
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What a ladder says.

    design           "whole run" or "fork", of the sweeps that the laws are fitted to
    params, tokens   the size that is predicted
    margin           the largest gap that counts as none, in % of the baseline's loss
    measured         one row for each arm and size: design, arm, params, tokens, n, gap_pct, se_pct (NaN for one
                     replicate), loss (the baseline's, nats)
    predictions      arm -> its gap at that size
    held             arm -> its gap at the largest size against its prediction from the smaller ones
    gaussian         arm -> the gap in % at the largest size that its formats' error on Gaussian numbers predicts from
                     the gaps of the other arms (gaussian.py); NaN where it is not known
    curves           arm, params, gap_pct, low, high: predictions from the smallest size to the one asked for
    warnings         sentences that stand with every verdict
    """

    design: str
    params: float
    tokens: float
    margin: float
    measured: pd.DataFrame
    predictions: Mapping[str, Prediction]
    held: Mapping[str, HeldOut]
    gaussian: Mapping[str, float]
    curves: pd.DataFrame
    warnings: tuple[str, ...]

    def verdict(self, arm: str) -> str:
        """One of worse, better, equivalent, undecided: of the prediction's interval against 0 and the margin."""
        prediction = self.predictions[arm]
        if -self.margin < prediction.low and prediction.high < self.margin:
            return "equivalent"
        return "worse" if prediction.low > 0 else "better" if prediction.high < 0 else "undecided"

    def sentence(self, arm: str) -> str:
        """The prediction in words."""
        prediction, held = self.predictions[arm], self.held.get(arm)
        text = (
            f"{self.verdict(arm)} at {size_text(self.params)} parameters and {size_text(self.tokens)} tokens:"
            f" {prediction.gap:+.2f} % ({prediction.low:+.2f} to {prediction.high:+.2f} %)"
        )
        if prediction.disagree:
            laws = " and ".join(f"{law} {values[0]:+.2f} %" for law, values in prediction.laws.items())
            text += f"; the laws disagree: {laws}"
        if held is not None:
            found = "lies in" if held.covered else "lies OUTSIDE of"
            text += (
                f"; the largest size, {held.measured:+.2f} %, {found} its prediction from the smaller ones"
                f" ({held.prediction.low:+.2f} to {held.prediction.high:+.2f} %)"
            )
        return f"{text}. {' '.join(self.warnings)}".strip()


def ladder(
    sweeps: Sequence[Sequence[RunDir]],
    at: tuple[float | None, float | None] = (None, None),
    design: str | None = None,
    margin: float = 0.25,
) -> Ladder:
    """The ladder of sweeps, each with one size of a model.

    at      parameters and tokens to predict; None: BEYOND times the largest size, and its tokens a parameter
    design  "fork" or "whole": the sweeps that laws are fitted to; None: forks, where there are some
    margin  in % of the baseline's loss

    UserError for a sweep with several sizes, fewer than two sizes, and another design.
    """
    found: dict[str, list[Rung]] = {}
    errors: dict[str, float | None] = {}
    for runs in sweeps:
        errors |= _errors(runs)
        comparison = compare(runs)
        found.setdefault(comparison.design, []).append(rung_of(comparison))
    if design is not None and design not in DESIGNS:
        raise UserError(f"design: got '{design}'; it takes {' or '.join(DESIGNS)}")
    chosen = DESIGNS[design] if design else FORK if FORK in found else WHOLE
    rungs = found.get(chosen, [])
    if len({rung.params for rung in rungs}) < FEWEST:
        have = ", ".join(f"{len(own)} of {name}s" for name, own in found.items())
        raise UserError(
            f"ladder: {len(rungs)} sizes in sweeps of {chosen}s (came: {have}); give a sweep for each size, and"
            f" {FEWEST} sizes at least"
        )
    largest = max(rungs, key=lambda rung: (rung.params, rung.tokens))
    params = at[0] or BEYOND * largest.params
    tokens = at[1] or params * largest.tokens / largest.params
    return Ladder(
        design=chosen, params=params, tokens=tokens, margin=margin,
        measured=pd.DataFrame([row for name, own in found.items() for rung in own for row in _rows(name, rung)]),
        predictions=predict(rungs, params, tokens), held=hold_out(rungs),
        gaussian=expected_gaps({arm: _percent(largest, arm) for arm in largest.gaps}, errors),
        curves=_curves(rungs, params, tokens / params), warnings=tuple(warnings(rungs, params, tokens)),
    )  # fmt: skip


def _errors(runs: Sequence[RunDir]) -> dict[str, float | None]:
    """Arm -> the Gaussian error of its recipe."""
    recipes = {str(run.manifest().get("arm")): run.config().get("recipe") for run in runs}
    return {arm: gaussian_error(recipe) for arm, recipe in recipes.items()}


def _percent(rung: Rung, arm: str) -> float:
    return float(rung.gaps[arm].mean() * 100 / rung.losses.mean())


def rung_of(comparison: Comparison) -> Rung:
    """The size, tokens, losses and gaps of one sweep, in nats."""
    runs = comparison.frames.runs
    sizes, names = runs["manifest.params"].dropna().unique(), sorted(runs["sweep"].unique())
    if len(sizes) != 1 or len(set(comparison.baseline_of.values())) != 1:
        raise UserError(
            f"ladder: {', '.join(names)} has {len(sizes)} sizes of a model and"
            f" {len(set(comparison.baseline_of.values()))} baselines; give one sweep for each size"
        )
    fork = comparison.design == FORK
    ends = runs["point"] + runs[FORK_CONSTANT] + runs[FORK_DECAY] if fork else runs["config.train.steps"]
    finals = comparison.finals[comparison.finals["arm"] == comparison.baseline]
    losses = finals.groupby("trunk", sort=False)[LOSSES[DECIDES[comparison.design]]].mean().dropna()
    points = comparison.points.assign(part=comparison.points["gap"] * comparison.points["weight"])
    nulls = set(comparison.arms["arm"][comparison.arms["null"]])
    gaps = {
        arm: own.groupby("trunk", sort=False)["part"].sum().to_numpy()
        for arm, own in points.groupby("arm", sort=False)
        if arm not in nulls
    }
    if losses.empty or not gaps:
        raise UserError(f"ladder: {', '.join(names)} has no finished arm beside its baseline; let its runs finish")
    tokens = float(ends.mean() * tokens_per_step(runs).iloc[0])
    return Rung(params=float(sizes[0]), tokens=tokens, losses=losses.to_numpy(float), gaps=gaps)


def _rows(design: str, rung: Rung) -> Iterable[dict[str, Any]]:
    percent = 100 / rung.losses.mean()
    for arm, gaps in rung.gaps.items():
        error = float(np.std(gaps, ddof=1) / math.sqrt(len(gaps))) * percent if len(gaps) > 1 else math.nan
        yield {
            "design": design, "arm": arm, "params": rung.params, "tokens": rung.tokens, "n": len(gaps),
            "gap_pct": float(gaps.mean()) * percent, "se_pct": error, "loss": float(rung.losses.mean()),
        }  # fmt: skip


def _curves(rungs: Sequence[Rung], largest: float, ratio: float) -> pd.DataFrame:
    sizes = np.geomspace(min(rung.params for rung in rungs), max(largest, max(rung.params for rung in rungs)), POINTS)
    rows = [
        {"arm": arm, "params": size, "gap_pct": one.gap, "low": one.low, "high": one.high}
        for size in sizes
        for arm, one in predict(rungs, size, ratio * size, draws=100).items()
    ]
    return pd.DataFrame(rows, columns=["arm", "params", "gap_pct", "low", "high"])


def document(found: Ladder) -> dict[str, Any]:
    """The ladder for programs."""
    arms = [
        {
            "arm": arm, "verdict": found.verdict(arm), "gap_pct": one.gap, "low": one.low, "high": one.high,
            "laws": {law: {"gap_pct": mid, "low": low, "high": high} for law, (mid, low, high) in one.laws.items()},
            "disagree": one.disagree, "eff_n": one.eff_n[0], "eff_n_low": one.eff_n[1], "eff_n_high": one.eff_n[2],
            "gaussian_pct": None if math.isnan(error := found.gaussian.get(arm, math.nan)) else error,
            "eff_d": one.eff_d[0], "eff_d_low": one.eff_d[1], "eff_d_high": one.eff_d[2], "sizes": one.sizes,
            "held_out": None if (held := found.held.get(arm)) is None else {
                "measured": held.measured, "low": held.prediction.low, "high": held.prediction.high,
                "covered": held.covered,
            },
            "sentence": found.sentence(arm),
        }
        for arm, one in found.predictions.items()
    ]  # fmt: skip
    return {
        "design": found.design, "params": found.params, "tokens": found.tokens, "margin": found.margin, "arms": arms,
        "measured": found.measured.to_dict("records"), "warnings": list(found.warnings),
    }  # fmt: skip


def parse_size(text: str | float, name: str) -> float:
    """A number of parameters or tokens: 124M, 2.5B, 3e7. UserError, which begins with `name`, for anything else."""
    word = str(text).strip().lower()
    unit = word[-1:] if word[-1:] in UNITS and word[-1:] else ""
    try:
        value = float(word.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{name}: got '{text}'; it takes a number above 0, such as 124M, 2.5B or 3e7")
    return value


def size_text(value: float) -> str:
    """A number as 30M."""
    unit = next((name for name in ("t", "b", "m", "k") if value >= UNITS[name]), "")
    return f"{value / UNITS[unit]:.3g}{unit.upper() if unit != 'k' else unit}"
