"""Gaps over tokens: the course of a gap since a fork, and the slowdown for which a gap stands.

The course has a part that comes at once, a part that lasts, and a growth. A switch of recipe is a shock, above all to a
pretrained model, and training may heal a part of it. First the end of the curve is judged, by the slope of each trunk
over the second half of the steps. It grows where the slope's interval lies on the side of the gap; else it is flat
where the change over that half lies within the margin, by two one-sided tests; else it closes where the interval lies
on the other side of 0; and it is open elsewhere. Then a family is fitted by least squares, with one tau for all trunks,
by their mean curve:

    gap(s) = lasting + shock exp(-s / tau) [+ growth s where it grows],    s steps since the fork, at the constant rate

tau is at most a quarter of the steps, and free where the gap closes. Intervals are over trunks, so that the noise
within a curve, whose rows depend on each other, needs no model; the doubt of tau is part of the lasting part's doubt,
by the jackknife. The part at once is the gap of the first row. A family whose residuals, averaged over a third of the
steps, are resolved from 0 does not fit, and gives no parts.

The slowdown says how many more tokens an arm needs for the loss that the baseline has. Where the baseline's loss falls
by b nats for each doubling of all tokens, a gap of g nats stands for a slowdown of 100 (2^(g / b) - 1) %. In the terms
of scaling laws it is 1 / effD - 1, and effD is the part of an arm's tokens that count (Castro et al.,
arXiv:2505.14669). Unlike a gap it has no unit of a loss, and does not shrink where a curve is flat: half of a small
slope is as much time as half of a large one.

Replicates give pairs (g, b). The interval of g / b has every u whose g - u b passes a t test of mean 0 (Fieller 1954):
the noise of the slopes is in it, and a slowdown lies above 0 exactly where the gap does.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from hqsweep.verdicts.designs import Forks

FEWEST_ROWS = 12
"""Rows of a curve below which it has no course."""
LONGEST = 0.25
"""The largest tau of a curve that does not close, as a part of its steps: exp(-4) of the shock is left at the end."""
FAR = 10
"""How many times the steps of a curve a forecast of its end may reach."""
TRIED = 12
"""The values of tau that are tried first, evenly in their logarithm."""
UNFIT = 0.01
"""How often a family is refused where it holds, over all thirds."""
Interval = tuple[float, float, float]
"""A mean with the ends of its interval."""
NOTHING: Interval = (math.nan, math.nan, math.nan)


@dataclass(frozen=True, kw_only=True)
class Course:
    """The course of one arm's gap, in the unit of the curves; intervals hold together for all arms.

    end      "flat", "closing" (towards 0), "growing" (away from it) or "open" (not known which)
    slope    of the end, by each 100 steps
    at_once  the gap of the first row
    lasting  the part that is left; NaN unless the end is flat and the family fits
    more     steps after which the change of an end that closes would lie within half of the margin; inf where FAR times
             as many are too few, NaN for other ends
    fitted   [rows]: the mean curve by the family; [] where none fits
    """

    end: str
    slope: Interval
    at_once: Interval
    lasting: Interval = NOTHING
    more: float = math.nan
    fitted: np.ndarray = field(default_factory=lambda: np.empty(0))


def course(curves: ArrayLike, steps: ArrayLike, design: Forks, margin: float) -> Course | None:
    """The course of one arm; None for fewer trunks or rows than it takes.

    curves  [trunks, rows]: gaps of the arm to the baseline in each trunk, averaged over its points
    steps   [rows]: steps since the fork, rising, at the constant rate
    margin  the largest gap that counts as none, in the unit of the curves

    Raises ValueError for arrays of other shapes, and for values that are not finite.
    """
    gaps, at = np.asarray(curves, dtype=np.float64), np.asarray(steps, dtype=np.float64)
    if gaps.ndim != 2 or at.shape != gaps.shape[1:] or not (np.isfinite(gaps).all() and np.isfinite(at).all()):
        raise ValueError(f"curves {gaps.shape} and steps {at.shape} must be finite, a row of curves for each trunk")
    if len(gaps) < design.first or len(at) < FEWEST_ROWS:
        return None
    errors = design.critical(len(gaps))
    half = at >= at[-1] / 2
    slopes = 100 * gaps[:, half] @ _slope(at[half])
    slope = _interval(slopes, errors)
    near = design.equivalence(len(gaps)) * (slopes.std(ddof=1) / math.sqrt(len(gaps)))
    end = _end(slope, gaps[:, half].mean(), near, 100 * margin / np.ptp(at[half]))
    family, mean = _Family(at, end), gaps.mean(0)
    tau = family.tau(mean)
    columns, at_once = family.columns(tau), _interval(gaps[:, 0], errors)
    if not _fits(gaps - (columns @ _parts(columns, gaps.T)).T):
        return Course(end=end, slope=slope, at_once=at_once)
    parts = _parts(columns, mean)
    return Course(
        end=end, slope=slope, at_once=at_once, fitted=columns @ parts,
        lasting=_lasting(gaps, family, tau, errors) if end == "flat" else NOTHING,
        more=_more(parts[1], tau, at[-1], margin) if end == "closing" else math.nan,
    )  # fmt: skip


def _slope(steps: np.ndarray) -> np.ndarray:
    """[rows]: the weights of the slope of a least-squares line."""
    centred = steps - steps.mean()
    return centred / (centred**2).sum()


def _interval(values: np.ndarray, errors: float) -> Interval:
    """Mean, low, high of one value a trunk."""
    half = errors * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def _end(slope: Interval, gap: float, near: float, margin: float) -> str:
    """Course.end. near: between the slope and the ends of its 90 % interval; margin: the largest slope by 100 steps
    whose change over the half counts as none."""
    mean, low, high = slope
    resolved, away = low > 0 or high < 0, mean * gap > 0
    if resolved and away:
        return "growing"
    if abs(mean) + near < margin:
        return "flat"
    return "closing" if resolved else "open"


@dataclass(frozen=True)
class _Family:
    """The family of curves [rows] with such an end: a constant, exp(-s / tau) and, where the gap grows, a line."""

    steps: np.ndarray
    end: str

    def columns(self, tau: float) -> np.ndarray:
        """[rows, parts]: what a part of 1 adds to each row."""
        line = [self.steps / 100] if self.end == "growing" else []
        return np.stack([np.ones_like(self.steps), np.exp(-self.steps / tau), *line], axis=1)

    def tau(self, mean: np.ndarray) -> float:
        """The tau with the least squares: the best of TRIED values, and then between its neighbours."""
        shortest = float(np.diff(self.steps).min()) / 3
        longest = max((FAR if self.end == "closing" else LONGEST) * self.steps[-1], 2 * shortest)
        tried = np.linspace(math.log(shortest), math.log(longest), TRIED)
        best = int(np.argmin([self._squares(mean, log) for log in tried]))
        around = tried[max(best - 1, 0)], tried[min(best + 1, TRIED - 1)]
        found = optimize.minimize_scalar(lambda log: self._squares(mean, log), bounds=around, method="bounded")
        return math.exp(found.x)

    def _squares(self, mean: np.ndarray, log: float) -> float:
        columns = self.columns(math.exp(log))
        return float(((mean - columns @ _parts(columns, mean)) ** 2).sum())


def _parts(columns: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """[parts, ...] of curves [rows, ...] by least squares."""
    return np.linalg.lstsq(columns, curves, rcond=None)[0]


def _lasting(gaps: np.ndarray, family: _Family, tau: float, errors: float) -> Interval:
    """Course.lasting. Its standard error is the larger of two: over trunks at this tau, and by the jackknife, which
    fits tau again without each trunk."""
    count, own = len(gaps), _parts(family.columns(tau), gaps.T)[0]
    without = []
    for trunk in range(count):
        mean = np.delete(gaps, trunk, axis=0).mean(0)
        without.append(_parts(family.columns(family.tau(mean)), mean)[0])
    half = errors * max(own.std(ddof=1), (count - 1) * np.std(without, ddof=1)) / math.sqrt(count)
    return float(own.mean()), float(own.mean() - half), float(own.mean() + half)


def _fits(residuals: np.ndarray) -> bool:
    """Whether the mean residual of no third of the rows is resolved from 0."""
    errors = -float(special.stdtrit(len(residuals) - 1, UNFIT / 6))
    thirds = [part.mean(1) for part in np.array_split(residuals, 3, axis=1)]
    return all(low <= 0 <= high for _, low, high in (_interval(part, errors) for part in thirds))


def _more(shock: float, tau: float, length: float, margin: float) -> float:
    """Course.more."""
    ends = length * np.linspace(1, 1 + FAR, 10 * FAR + 1)  # tenths of the known length
    enough = np.abs(shock) * (np.exp(-ends / 2 / tau) - np.exp(-ends / tau)) < margin / 2
    return float(ends[enough][0] - length) if enough.any() and tau < 0.99 * FAR * length else math.inf


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
