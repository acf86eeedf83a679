"""Slowdown: how many more tokens since its start an arm needs for the loss that the baseline has.

An arm whose tokens count e-fold (effD of the scaling laws, Kumar et al. arXiv:2411.04330, Castro et al.
arXiv:2505.14669) has after N tokens the loss that the baseline has after e N; its slowdown is 1 / e - 1. A gap grows
with the tokens since the fork; a slowdown does not, as long as the arm learns like the baseline on fewer tokens.

The baseline's loss falls by `slope` nats for each doubling of all tokens T, those of the trunk included. A slowdown s
therefore predicts the gap h(s) = slope log2(T / (T - N + N / (1 + s))), and h(0) = 0. Its interval has every s for
which the replicates' z(s) = gap - h(s) pass a t test of mean 0 (Fieller's way to a ratio): the noise of the slopes is
in it, and an arm is worse (s > 0) exactly where its gap is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

SHARES = np.concatenate([[1e-9], np.geomspace(1e-3, 8.0, 241)])
"""The values of e among which the ends of an interval are looked for. An end at the first stands for a slowdown without
a bound: the arm may have learnt nothing. An end at the last stands for -100 %."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The slowdown of an arm, in % of the tokens since its start.

    pct, low, high    estimate and joint 95 % interval; inf where no number of tokens reaches the baseline's loss; NaN
                      where the baseline does not learn, and of the interval for one replicate
    eq_low, eq_high   90 % interval, whose two ends are the two one-sided tests of equivalence
    """

    pct: float = math.nan
    low: float = math.nan
    high: float = math.nan
    eq_low: float = math.nan
    eq_high: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What an arm and its baseline did.

    gaps    [replicates, points]: loss of the arm minus that of the baseline; any unit
    slopes  [replicates, points]: what a doubling of all tokens takes off the baseline's loss, in the same unit
    total   [points]: all tokens (or steps) at the end, those of the trunk included
    since   [points]: the part of them since the fork; `total` of runs from scratch
    """

    gaps: np.ndarray
    slopes: np.ndarray
    total: np.ndarray
    since: np.ndarray

    @classmethod
    def of(cls, gaps: ArrayLike, slopes: ArrayLike, total: ArrayLike, since: ArrayLike) -> "Curves":
        """The arrays as float64. Raises ValueError for other shapes, values that are not finite, and more tokens since
        the fork than in all."""
        arrays = (np.asarray(values, dtype=np.float64) for values in (gaps, slopes, total, since))
        curves = cls(**dict(zip(("gaps", "slopes", "total", "since"), arrays, strict=True)))
        if curves.gaps.ndim != 2 or curves.slopes.shape != curves.gaps.shape:
            raise ValueError(f"gaps {curves.gaps.shape} and slopes {curves.slopes.shape} are [replicates, points]")
        if curves.total.shape != curves.since.shape or curves.total.shape != curves.gaps.shape[1:]:
            raise ValueError(f"total {curves.total.shape} and since {curves.since.shape} have a value for each point")
        if not all(np.isfinite(values).all() for values in vars(curves).values()):
            raise ValueError("gaps, slopes and tokens must be finite")
        if not ((curves.since > 0) & (curves.since <= curves.total)).all():
            raise ValueError(f"since {curves.since} must lie above 0, and not above total {curves.total}")
        return curves

    def expected(self, share: float) -> np.ndarray:
        """[replicates, points]: the gap of an arm whose tokens since the fork count `share`-fold."""
        reached = self.total - self.since + share * self.since
        return self.slopes * np.log2(self.total / reached)

    def gap_of(self, pct: float) -> float:
        """The mean gap, over replicates and points, of a slowdown in %."""
        return float(self.expected(1 / (1 + pct / 100)).mean())


def slowdown(curves: Curves, critical: float, equivalence: float) -> Slowdown:
    """The slowdown of one arm; `critical` and `equivalence`: the standard errors between the gap and the ends of its
    95 % and 90 % intervals (verdicts.designs.Design), NaN for one replicate."""
    if not curves.slopes.mean() > 0:
        return Slowdown()
    pct = _pct(_root(lambda share: float((curves.gaps - curves.expected(share)).mean())))
    if math.isnan(critical):
        return Slowdown(pct=pct)
    (low, high), (eq_low, eq_high) = interval(curves, critical), interval(curves, equivalence)
    return Slowdown(pct=pct, low=low, high=high, eq_low=eq_low, eq_high=eq_high)


def interval(curves: Curves, errors: float) -> tuple[float, float]:
    """(low, high) in %: the slowdowns whose z(s) has a mean within `errors` standard errors of 0."""
    above = _root(lambda e: _distance(curves, e, -errors))
    below = _root(lambda e: _distance(curves, e, errors))
    return _pct(max(above, below)), _pct(min(above, below))


def _distance(curves: Curves, share: float, errors: float) -> float:
    """The mean of z less `errors` standard errors of it."""
    z = (curves.gaps - curves.expected(share)).mean(1)
    return float(z.mean() - errors * z.std(ddof=1) / np.sqrt(len(z)))


def _root(function: Callable[[float], float]) -> float:
    """The share e at which a function, which rises with e, is 0; the first or last of SHARES where it has no sign
    change."""
    low, high = SHARES[0], SHARES[-1]
    if function(low) >= 0:
        return low
    if function(high) <= 0:
        return high
    return float(optimize.brentq(function, low, high, xtol=1e-12))


def _pct(share: float) -> float:
    """The slowdown in % of a share of tokens that count."""
    if share <= SHARES[0]:
        return np.inf
    return -100.0 if share >= SHARES[-1] else 100 * (1 / share - 1)
