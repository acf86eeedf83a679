"""Verdicts on forks: averaged within a trunk first, then the arm's own t over trunks.

Forks of one trunk share its state, so they are not replicates: taken as such, with trunks of a share .8 of the
variance, 61 % of studies without a gap claim one. The mean over a trunk's forks is the exact balanced mixed model
(trunks random, points fixed): true differences between points cancel in it and widen nothing.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from hqsweep.verdicts.designs import Forks
from hqsweep.verdicts.estimate import LEVEL, Estimate
from hqsweep.verdicts.looks import equal_shapes, estimates


def judge(
    gaps: Mapping[str, ArrayLike], *, null: str | None = None, margin: float, maximum: int | None = None
) -> dict[str, Estimate]:
    """The estimate of every arm over all trunks of this kind; fewer than three trunks give intervals and no verdict.

    gaps     per arm [trunks, points]: arm minus baseline of the fork of the same trunk at the same point, on the same
             batches; the same trunks and points in every arm, all finite; any unit, which is the margin's
    null     an arm judged alone: it is not among the arms whose number widens the others' intervals
    maximum  the study is looked at after each trunk, in the given order, and has at most so many

    Raises ValueError for arrays that are not finite, or of other shapes; UserError for a maximum below the trunks.
    """
    arrays = equal_shapes(gaps, 2)
    families = [[name for name in arrays if name != null], [name for name in arrays if name == null]]
    judged = {}
    for arms in filter(None, families):
        stacked = np.stack([arrays[name] for name in arms])
        design = Forks(arms=len(arms), maximum=maximum)
        judged |= estimates(arms, partial(fit, stacked), design, stacked.shape[1], margin)
    return {name: judged[name] for name in arrays}


def fit(gaps: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaps and standard errors [..., k] over the first n trunks; gaps [..., k, trunks, points]."""
    means = gaps[..., :n, :].mean(-1)
    error = means.std(-1, ddof=1) / np.sqrt(n) if n > 1 else np.full(means.shape[:-1], np.nan)
    return means.mean(-1), error


def these_forks(gaps: Mapping[str, ArrayLike], null: str | None = None) -> dict[str, tuple[float, float]]:
    """(low, high) of every arm's mean gap at these points of these trunks, 95 % together for all arms (the null arm:
    its own). It says nothing of another trunk and decides nothing.

    se^2 = max(MS of trunk x point, mean of the null arm's squared gaps) / (trunks points), with (trunks - 1) (points
    - 1) degrees of freedom; of one trunk: the variance over points, points - 1. True differences of a gap between
    trunk x point are in it, so it errs to the wide side. NaN for one point.
    """
    arrays = equal_shapes(gaps, 2)
    arms = sum(name != null for name in arrays)
    floor = float((arrays[null] ** 2).mean()) if null in arrays else 0.0
    return {name: _interval(array, floor, 1 if name == null else arms) for name, array in arrays.items()}


def _interval(gaps: np.ndarray, floor: float, arms: int) -> tuple[float, float]:
    trunks, points = gaps.shape
    df = max(1, trunks - 1) * (points - 1)
    if not df:
        return np.nan, np.nan
    residual = gaps - gaps.mean(1, keepdims=True) - (gaps.mean(0) - gaps.mean() if trunks > 1 else 0)
    error = np.sqrt(max((residual**2).sum() / df, floor) / gaps.size)
    half = -special.stdtrit(df, LEVEL / (2 * arms)) * error
    return float(gaps.mean() - half), float(gaps.mean() + half)
