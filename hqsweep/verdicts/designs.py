"""The two designs of a study, as laws of its statistics: how large a gap over its standard error must be.

The largest of k equicorrelated t values: T_i = (sqrt(1 - r) Z_i + sqrt(r) Z_0) / S with independent standard normal Z
and S^2 ~ chi2(df) / df are the statistics of k arms that share their baseline and their estimate of the variance. Tails
and bounds of max |T_i| come from quadrature, so that the same data give the same verdict in every digit (scipy's
multivariate_t draws random points). df need not be an integer.

A growing study is looked at after each replicate n = 2, 3, ... N, where N is stated before the first. By look n a study
without any gap has raised a false flag with probability level (n / N)^2 (alpha spending by a power family). t values of
few degrees of freedom jump more from look to look than normal theory has it, whose boundary would make 7 % of 5 %; so
the law of the t values themselves is followed, without simulation:

u_n = t_n / sqrt(n - 1 + t_n^2) is the cosine between the n values and (1, ..., 1). Given u_{n+1}, the last value as a
share of the vector's length is y = u_{n+1} / sqrt(n + 1) + sqrt((1 - u_{n+1}^2) n / (n + 1)) w with w = a coordinate
of a uniform direction in n dimensions, and u_n = (sqrt(n + 1) u_{n+1} - y) / sqrt(n (1 - y^2)). Hence, with G_n(u)
the probability that no look before n raised a flag, G_{n+1}(u_{n+1}) is the mean over w of G_n(u_n) where u_n lies
within look n's bound; and the level of look n + 1 is the tail of t in which G_{n+1} integrates to what this look may
spend.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy import optimize, special

from hqsweep.errors import UserError
from hqsweep.memo import memo
from hqsweep.verdicts.estimate import LEVEL, MAXIMUM

TAILS = 400
DIRECTIONS = 1000
"""The number of points of the tail probabilities, and of w. Four times as many move no level of up to 16 looks by more
than 0.05 %, and none of 100 looks by more than 0.3 %."""


def two_sided(level: float, n: int, maximum: int) -> float:
    """The p of the two-sided t test of n replicates below which this look raises a flag, when `level` is spent by
    `maximum`."""
    check(n, maximum)
    return _levels(level, maximum, True)[n - 2]


def one_sided(level: float, n: int, maximum: int) -> float:
    """two_sided() for a one-sided t test."""
    check(n, maximum)
    return _levels(level, maximum, False)[n - 2]


def check(n: int, maximum: int) -> None:
    """Raise UserError for more replicates than were stated, or a statement that is out of reach."""
    if not 2 <= maximum <= MAXIMUM:
        raise UserError(f"seeds.max: {maximum}; allowed are 2 to {MAXIMUM} replicates")
    if n > maximum:
        raise UserError(f"seeds.max: {maximum}, and {n} replicates are there; the largest number is stated beforehand")


@memo
def _levels(level: float, maximum: int, both: bool) -> list[float]:
    """The levels of the looks 2, ..., maximum. `both`: flags are raised on either side."""
    first = level * (2 / maximum) ** 2
    tails = np.geomspace(first * 1e-4, 0.5, TAILS)
    levels, cosine, quiet, bound = [], None, None, None
    for n in range(2, maximum + 1):
        upper = _cosine(n, -special.stdtrit(n - 1, tails))
        now = np.concatenate([-upper, upper[-2::-1]])
        quiet = np.ones_like(now) if n == 2 else _quiet(n, now, cosine, quiet, (-bound if both else -1.0, bound))
        cosine, high = now, quiet[::-1][:TAILS]
        steps = np.concatenate([[high[0] * tails[0]], (high[1:] + high[:-1]) / 2 * np.diff(tails)])
        spend = level * (n**2 - (n - 1) ** 2 * (n > 2)) / maximum**2 / (2 if both else 1)
        tail = np.interp(spend, np.cumsum(steps), tails)
        bound = _cosine(n, -special.stdtrit(n - 1, tail))
        levels.append(float(tail) * (2 if both else 1))
    return levels


def _cosine(n: int, t: np.ndarray) -> np.ndarray:
    return t / np.sqrt(n - 1 + t * t)


def _quiet(n: int, now: np.ndarray, before: np.ndarray, quiet: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """G_n at the cosines `now`, from G_{n-1} = `quiet` at the cosines `before` and the bounds of look n - 1."""
    even = (np.arange(DIRECTIONS) + 0.5) / DIRECTIONS
    direction = np.sin(np.pi * (even - 0.5)) if n == 3 else _cosine(n - 1, special.stdtrit(n - 2, even))
    share = now[:, None] / np.sqrt(n) + np.sqrt((1 - now[:, None] ** 2) * (n - 1) / n) * direction
    previous = (np.sqrt(n) * now[:, None] - share) / np.sqrt((n - 1) * (1 - share**2))
    inside = (bounds[0] <= previous) & (previous <= bounds[1])
    return (np.interp(previous, before, quiet) * inside).mean(1)


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
        level = LEVEL if self.maximum is None else one_sided(LEVEL, look or n, self.maximum)
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
        level = LEVEL if self.maximum is None else two_sided(LEVEL, look or n, self.maximum)
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
        level = level if self.maximum is None else two_sided(level, look or n, self.maximum)
        return -float(special.stdtrit(n - 1, level / 2))

    def p(self, statistics: np.ndarray, n: int) -> np.ndarray:
        """Each arm's own p, which judge_forks adjusts by holm() over arms of other n. The adjusted one may lie below
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
