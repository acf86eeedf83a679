"""Verdicts on forks: averaged within a trunk first, then the arm's own t over trunks.

Forks of one trunk share its state, so they are not replicates: taken as such, with trunks of a share .8 of the
variance, 61 % of studies without a gap claim one. The mean over a trunk's forks is the exact balanced mixed model
(trunks random, points fixed): true differences between points cancel in it and widen nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from hqsweep.verdicts.designs import Forks, holm
from hqsweep.verdicts.estimate import LEVEL, Estimate
from hqsweep.verdicts.looks import estimates, finite


def judge(
    gaps: Mapping[str, ArrayLike],
    *,
    null: str | None = None,
    margin: float,
    maximum: int | None = None,
    arms: int | None = None,
) -> dict[str, Estimate]:
    """The estimate of every arm over all trunks of this kind; fewer than three trunks give intervals and no verdict.

    gaps     per arm [trunks, points]: arm minus baseline of the fork of the same trunk at the same point, on the same
             batches; all finite; any unit, which is the margin's. Arms may have other trunks and points than each
             other, as Bonferroni's intervals hold together whichever trunks each of them is over
    null     an arm judged alone: it is not among the arms whose number widens the others' intervals
    maximum  the study is looked at after each trunk of an arm, in the given order, and has at most so many
    arms     the number of arms whose intervals hold together; None for the arms in `gaps`. A study that runs gives all
             that it will judge, so that no interval changes when another arm gets its first trunk

    Raises ValueError for arrays that are not finite or not of two dimensions; UserError for a maximum below the trunks.
    """
    arrays = finite(gaps, 2)
    together = _together(arrays, null, arms)
    judged = {}
    for name, array in arrays.items():
        design = Forks(arms=1 if name == null else together, maximum=maximum)
        judged |= estimates([name], partial(fit, array[None]), design, len(array), margin)
    tested = [name for name in arrays if name != null]
    untested = sum(np.isnan(judged[name].p) and judged[name].n > 1 for name in tested)
    adjusted = holm(np.array([judged[name].p for name in tested]), together - untested)
    for name, p in zip(tested, adjusted, strict=True):
        judged[name] = replace(judged[name], p=float(p))
    return judged


def _together(arrays: Mapping[str, np.ndarray], null: str | None, arms: int | None) -> int:
    """The number of arms whose intervals hold together: `arms`, and at least the arms under test that are here."""
    return max(arms or 1, sum(name != null for name in arrays))


def fit(gaps: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaps and standard errors [..., k] over the first n trunks; gaps [..., k, trunks, points]."""
    means = gaps[..., :n, :].mean(-1)
    error = means.std(-1, ddof=1) / np.sqrt(n) if n > 1 else np.full(means.shape[:-1], np.nan)
    return means.mean(-1), error


def these_forks(
    gaps: Mapping[str, ArrayLike], null: str | None = None, arms: int | None = None
) -> dict[str, tuple[float, float]]:
    """(low, high) of every arm's mean gap at its points of its trunks, 95 % together for all arms (the null arm: its
    own). It says nothing of another trunk and decides nothing. `arms` as in judge().

    se^2 = max(MS of trunk x point, mean of the null arm's squared gaps) / (trunks points), with (trunks - 1) (points
    - 1) degrees of freedom; of one trunk: the variance over points, points - 1. True differences of a gap between
    trunk x point are in it, so it errs to the wide side. NaN for one point.
    """
    arrays = finite(gaps, 2)
    together = _together(arrays, null, arms)
    floor = float((arrays[null] ** 2).mean()) if null in arrays else 0.0
    return {name: _interval(array, floor, 1 if name == null else together) for name, array in arrays.items()}


def _interval(gaps: np.ndarray, floor: float, arms: int) -> tuple[float, float]:
    trunks, points = gaps.shape
    df = max(1, trunks - 1) * (points - 1)
    if not df:
        return np.nan, np.nan
    residual = gaps - gaps.mean(1, keepdims=True) - (gaps.mean(0) - gaps.mean() if trunks > 1 else 0)
    error = np.sqrt(max((residual**2).sum() / df, floor) / gaps.size)
    half = -special.stdtrit(df, LEVEL / (2 * arms)) * error
    return float(gaps.mean() - half), float(gaps.mean() + half)
