"""Slowdown: how many more tokens an arm needs for the loss that the baseline has.

Where the baseline's loss falls by b nats for each doubling of all tokens, a gap of g nats stands for a slowdown of
100 (2^(g / b) - 1) %. In the terms of scaling laws it is 1 / effD - 1, and effD is the part of an arm's tokens that
count (Castro et al., arXiv:2505.14669). Unlike a gap it has no unit of a loss, and does not shrink where a curve is
flat: half of a small slope is as much time as half of a large one.

Replicates give pairs (g, b). The interval of g / b has every u whose g - u b passes a t test of mean 0 (Fieller 1954):
the noise of the slopes is in it, and a slowdown lies above 0 exactly where the gap does.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The slowdown of an arm, in % of all tokens.

    pct, low, high    estimate and joint 95 % interval; NaN where the baseline does not learn. The interval of one
                      replicate is NaN. Where the noise of its slopes lets the baseline's curve be flat, there is no
                      estimate: the interval has one end (the other is infinite) if the gap is resolved, else none
    eq_low, eq_high   90 % interval, whose two ends are the two one-sided tests of equivalence
    """

    pct: float = math.nan
    low: float = math.nan
    high: float = math.nan
    eq_low: float = math.nan
    eq_high: float = math.nan


def slowdown(
    gaps: ArrayLike, slopes: ArrayLike, critical: float, equivalence: float, error: float = math.nan
) -> Slowdown:
    """The slowdown of one arm over its replicates.

    gaps, slopes  [replicates]: loss of the arm minus loss of the baseline; what a doubling of all tokens takes off the
                  baseline's loss. In one unit: nats, or % of the baseline's loss
    critical, equivalence  the standard errors between a gap and the ends of its 95 % and 90 % intervals
                  (verdicts.designs.Design); NaN for one replicate
    error         the standard error of the mean gap, where `gaps` alone do not give it (whole runs); NaN: it is

    Raises ValueError for arrays of other shapes, or values that are not finite.
    """
    gap, slope = (np.asarray(values, dtype=np.float64) for values in (gaps, slopes))
    if gap.ndim != 1 or gap.shape != slope.shape or not len(gap):
        raise ValueError(f"gaps {gap.shape} and slopes {slope.shape} must have one value for each replicate")
    if not (np.isfinite(gap).all() and np.isfinite(slope).all()):
        raise ValueError(f"gaps and slopes must be finite, not {gap} and {slope}")
    if not slope.mean() > 0:
        return Slowdown()
    (low, high), (eq_low, eq_high) = (ratio_interval(gap, slope, errors, error) for errors in (critical, equivalence))
    known = math.isnan(critical) or len(gap) == 1 or math.isfinite(high - low)
    doublings = (gap.mean() / slope.mean() if known else math.nan, low, high, eq_low, eq_high)
    return Slowdown(**dict(zip(("pct", "low", "high", "eq_low", "eq_high"), map(in_percent, doublings), strict=True)))


def in_percent(doublings: float) -> float:
    """The slowdown in % of so many doublings of tokens."""
    with np.errstate(over="ignore"):  # of slopes that are hardly above 0
        return 100 * float(np.expm1(doublings * math.log(2)))


def ratio_interval(gap: np.ndarray, slope: np.ndarray, errors: float, error: float = math.nan) -> tuple[float, float]:
    """(low, high) of mean(gap) / mean(slope): every u at which mean(gap - u slope) lies within `errors` standard errors
    of 0. NaN for one replicate. Where slopes are so noisy that the mean slope may be 0, one end is infinite if the gap
    is resolved (the true slope is above 0), and both are NaN if it is not. `error`: the standard error of mean(gap),
    NaN for the error over the replicates."""
    n = len(gap)
    if n < 2 or math.isnan(errors):
        return math.nan, math.nan
    # (g - u b)^2 = errors^2 (var g - 2 u cov + u^2 var b) / n is a u^2 - 2 h u + c = 0.
    (var_gap, cov), (_, var_slope) = np.cov(gap, slope) * errors**2 / n
    var_gap = var_gap if math.isnan(error) else (errors * error) ** 2
    a = slope.mean() ** 2 - var_slope
    h, c = gap.mean() * slope.mean() - cov, gap.mean() ** 2 - var_gap
    root = h * h - a * c
    if a <= 0:
        if c <= 0:
            return math.nan, math.nan
        near = float(c / (2 * h) if a == 0 else (h - math.copysign(math.sqrt(root), gap.mean())) / a)
        return (near, math.inf) if gap.mean() > 0 else (-math.inf, near)
    if root < 0:
        return math.nan, math.nan
    return float((h - math.sqrt(root)) / a), float((h + math.sqrt(root)) / a)
