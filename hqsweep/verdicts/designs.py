"""The two designs of a study, as laws of its statistics: how large a gap over its standard error must be.

The largest of k equicorrelated t values: T_i = (sqrt(1 - r) Z_i + sqrt(r) Z_0) / S with independent standard normal Z
and S^2 ~ chi2(df) / df are the statistics of k arms that share their baseline and their estimate of the variance. Tails
and bounds of max |T_i| come from quadrature, so that the same data give the same verdict in every digit (scipy's
multivariate_t draws random points). df need not be an integer.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy import optimize, special

from hqsweep.memo import memo
from hqsweep.verdicts import levels
from hqsweep.verdicts.estimate import LEVEL

QUANTILES = (np.arange(120) + 0.5) / 120


@dataclass(frozen=True, kw_only=True)
class Design:
    """`arms` arms under test, judged together. `maximum`: the replicates that were stated for a study which is looked
    at after each."""

    arms: int
    maximum: int | None = None
    first: ClassVar[int] = 2
    """The number of replicates of the first verdict."""

    def df(self, n: int) -> float:
        """Degrees of freedom of the standard error."""
        return n - 1

    def equivalence(self, n: int, look: int | None = None) -> float:
        """The standard errors between the gap and the ends of the interval that the margin must hold, always with n - 1
        degrees of freedom (with more, 6 to 7 % of verdicts were wrong instead of 5 %). The level holds for each arm. It
        is the level of the look after n replicates, or of another `look`."""
        level = LEVEL if self.maximum is None else levels.one_sided(LEVEL, look or n, self.maximum)
        return -float(special.stdtrit(n - 1, level))

    def critical(self, n: int, look: int | None = None) -> float:
        """The standard errors between the gap and the ends of its interval, joint over the arms."""
        raise NotImplementedError

    def p(self, statistics: np.ndarray, n: int) -> np.ndarray:
        """The p values of |gap| / se [arms]; of whole runs they are adjusted for the number of arms."""
        raise NotImplementedError

    def variances(self, n: int) -> np.ndarray:
        """Equally probable values of se^2 over its true value, where all arms vary alike."""
        return _chi2(n - 1) / (n - 1)


@dataclass(frozen=True, kw_only=True)
class WholeRuns(Design):
    """Runs from scratch, blocked by seed; `controls` is 2 with a null arm beside the baseline, else 1. `waiting`: arms
    of the same study that are not judged yet, and for which the intervals of the others leave room."""

    controls: int
    waiting: int = 0

    @property
    def together(self) -> int:
        """The number of arms whose intervals hold together."""
        return self.arms + self.waiting

    @property
    def correlation(self) -> float:
        """The correlation of two arms' gaps, which have the controls in common."""
        return 1 / (1 + self.controls)

    def df(self, n: int) -> float:
        """The degrees of freedom of the guarded standard error. The factors are the largest under which, over the
        simulated studies, at most 5 % of studies without a gap claim one, also where one arm varies 36 times as much as
        the rest."""
        if self.arms < 2:
            return n - 1
        factor = {(2, 1): 1.25, (2, 2): 1.5}.get((self.arms, self.controls), 1.0 + self.controls / 2)
        return min(factor * (n - 1), (self.arms + self.controls - 1) * (n - 1))

    def critical(self, n: int, look: int | None = None) -> float:
        level = LEVEL if self.maximum is None else levels.two_sided(LEVEL, look or n, self.maximum)
        return critical_of_largest(level, self.together, self.correlation, self.df(n))

    def p(self, statistics: np.ndarray, n: int) -> np.ndarray:
        df = self.df(n)
        return np.array([tail_of_largest(bound, self.together, self.correlation, df) for bound in statistics])

    def variances(self, n: int) -> np.ndarray:
        if self.arms < 2:
            return super().variances(n)
        total = self.arms + self.controls - 1
        own, others = _chi2(n - 1), _chi2((total - 1) * (n - 1))
        pooled = (own[:, None] + others) / (total * (n - 1))
        return np.maximum(own[:, None] / (n - 1), pooled).ravel()


@dataclass(frozen=True, kw_only=True)
class Forks(Design):
    """Forks averaged within trunks; trunks are the replicates, and every arm has its own t over them (Bonferroni).

    Two trunks are too few to speak of all trunks."""

    first: ClassVar[int] = 3

    def critical(self, n: int, look: int | None = None) -> float:
        level = LEVEL / self.arms
        level = level if self.maximum is None else levels.two_sided(level, look or n, self.maximum)
        return -float(special.stdtrit(n - 1, level / 2))

    def p(self, statistics: np.ndarray, n: int) -> np.ndarray:
        """Each arm's own p, which forks.judge adjusts by holm() over arms of other n. The adjusted one may lie below
        the level where the interval, which is Bonferroni's and decides, holds 0."""
        return 2 * special.stdtr(n - 1, -np.abs(statistics))


def holm(p_values: np.ndarray, tests: int = 0) -> np.ndarray:
    """Holm's step-down correction: the i-th smallest of m becomes max over j <= i of min(1, (m - j + 1) p_j), whichever
    tests depend on each other (Holm 1979). m is the number of p values, or `tests` where more are to come. NaN counts
    as no test."""
    order = np.argsort(p_values)[: np.isfinite(p_values).sum()]
    corrected = np.array(p_values, dtype=float)
    steps = p_values[order] * (max(tests, len(order)) - np.arange(len(order)))
    corrected[order] = np.minimum(1, np.maximum.accumulate(steps))
    return corrected


def _chi2(df: float) -> np.ndarray:
    return 2 * special.gammaincinv(df / 2, QUANTILES)


POINTS = 600
"""The number of points of S. They lie at the quantiles u = w^4 of evenly spaced w: the tail of T is made by small S.
With evenly spaced u a tail of 4e-5 comes out as 4e-6; so it is right to 3 digits down to 1e-11."""
NODES, WEIGHTS = hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def tail_of_largest(bound: float, arms: int, correlation: float, df: float) -> float:
    """P(max |T_i| > bound) for `arms` values with this correlation in [0, 1)."""
    if arms == 1:
        return float(2 * special.stdtr(df, -abs(bound)))
    scales, weights = _scales(df)
    common, own = np.sqrt(correlation) * NODES, np.sqrt(1 - correlation)
    outside = special.ndtr((common - bound * scales) / own) + special.ndtr((-common - bound * scales) / own)
    return float(weights @ (-np.expm1(arms * np.log1p(-np.minimum(outside, 1 - 1e-16))) @ WEIGHTS))


@memo
def critical_of_largest(level: float, arms: int, correlation: float, df: float) -> float:
    """The bound that max |T_i| exceeds with probability `level`, at most 0.05."""
    one = -float(special.stdtrit(df, level / 2))
    if arms == 1:
        return one
    bonferroni = -float(special.stdtrit(df, level / (2 * arms)))
    return optimize.brentq(
        lambda bound: tail_of_largest(bound, arms, correlation, df) - level, 0.99 * one, 1.01 * bonferroni
    )


@memo
def _scales(df: float) -> tuple[np.ndarray, np.ndarray]:
    """The values of S [POINTS, 1], and their weights [POINTS]."""
    even = (np.arange(POINTS) + 0.5) / POINTS
    scales = np.sqrt(2 * special.gammaincinv(df / 2, even**4) / df)
    return scales[:, None], 4 * even**3 / POINTS
