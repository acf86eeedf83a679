"""Verdicts from gaps: on runs from scratch, on forks, and on forks of several ages that end together.

Gaps and standard errors are judged at one look, or at looks after each replicate of a growing study.

Runs from scratch are blocked by seed, and judged against the mean of baseline and null arm, with guarded pooling. A t
of few degrees of freedom errs where an arm's own variance is small by luck, so the variance pooled over all arms
is a floor for it; the pooled one errs for an arm louder than the rest, so the arm's own is a floor too. Both cost
degrees of freedom (designs.WholeRuns.df). Plain pooling makes 9 to 24 % false claims where variances differ.

Forks are averaged within a trunk first, then judged by the arm's own t over trunks. Forks of one trunk share its state,
so they are not replicates: taken as such, with trunks of a share .8 of the variance, 61 % of studies without a gap
claim one. The mean over a trunk's forks is the exact balanced mixed model (trunks random, points fixed): true
differences between points cancel in it and widen nothing.

A fork has a smaller gap than a whole run that ends at the same step. One part of a gap comes with the switch; the rest
grows with age, the steps since the fork. Forks of one trunk that end at one step see the same tokens, so that age is
all that tells their gaps apart; a straight line through gap against age is at age 0 the part that comes at once, and at
the age of a whole run its gap. Each of these is a weighted sum of a trunk's gaps, and is judged over trunks as their
mean is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from hqsweep.verdicts import designs, plan
from hqsweep.verdicts.designs import Design, Forks, WholeRuns, holm
from hqsweep.verdicts.estimate import LEVEL, Estimate

Fit = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""A function of n: the gaps and standard errors [..., arms] of the first n replicates."""


def flags(fit: Fit, design: Design, n: int, margin: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(worse, better, within the margin) [..., arms] after n replicates. A flag that an earlier look raised stays; of
    worse and better the one stays that came first."""
    worse = better = within = np.zeros(fit(n)[0].shape, dtype=bool)
    looks = range(design.first, n + 1) if design.maximum else [n] if n >= design.first else []
    for look in looks:
        gap, error = fit(look)
        tested = (error > 0) | (gap == 0)
        far, near = design.critical(look) * error, design.equivalence(look) * error
        claimed = worse | better
        worse = worse | (tested & ~claimed & (gap > far))
        better = better | (tested & ~claimed & (gap < -far))
        within = within | (tested & (np.abs(gap) + near < margin))
    return worse, better, within


def estimates(names: Sequence[str], fit: Fit, design: Design, n: int, margin: float) -> dict[str, Estimate]:
    """The estimate of every arm, in the order of `names`. One replicate gives a gap alone, and so does a gap that is
    the same in every replicate; where it is 0 too, the arms are equal in every digit."""
    if design.maximum:
        designs.check(n, design.maximum)
    gap, error = fit(n)
    raised = flags(fit, design, n, margin)
    spread = np.where((error > 0) | (gap == 0), error, np.nan)
    joint, single = (design.critical(n), design.equivalence(n)) if n > 1 else (np.nan, np.nan)
    with np.errstate(invalid="ignore"):
        p = design.p(np.where(gap == 0, 0.0, np.abs(gap) / spread), n) if n > 1 else np.full(len(gap), np.nan)
    return {
        name: Estimate(
            gap=float(gap[i]),
            se=float(error[i]),
            df=float(design.df(n)) if n > 1 else np.nan,
            n=n,
            ci_low=float(gap[i] - joint * spread[i]),
            ci_high=float(gap[i] + joint * spread[i]),
            eq_low=float(gap[i] - single * spread[i]),
            eq_high=float(gap[i] + single * spread[i]),
            p=float(p[i]),
            margin=float(margin),
            worse=bool(raised[0][i]),
            better=bool(raised[1][i]),
            within_margin=bool(raised[2][i]),
            needed=np.nan
            if any(flag[i] for flag in raised) or not spread[i] > 0
            else plan.needed(design, float(error[i]) * n**0.5, gap=float(gap[i]), margin=margin, above=n),
        )
        for i, name in enumerate(names)
    }


def equal_shapes(values: Mapping[str, ArrayLike], dimensions: int) -> dict[str, np.ndarray]:
    """The arrays as float64. Raises ValueError where they are empty, not finite, or differ in shape."""
    arrays = finite(values, dimensions)
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"arms have other replicates than each other: shapes {shapes}")
    return arrays


def finite(values: Mapping[str, ArrayLike], dimensions: int) -> dict[str, np.ndarray]:
    """The arrays as float64. Raises ValueError where they are empty, not finite, or of other dimensions."""
    arrays = {name: np.asarray(array_like, dtype=np.float64) for name, array_like in values.items()}
    for name, array in arrays.items():
        if array.ndim != dimensions or not array.size or not np.isfinite(array).all():
            raise ValueError(f"'{name}': an array of {dimensions} dimension(s) of finite values is needed, not {array}")
    return arrays


def judge_whole_runs(
    losses: Mapping[str, ArrayLike],
    *,
    baseline: str,
    null: str | None = None,
    margin: float,
    maximum: int | None = None,
    waiting: int = 0,
) -> dict[str, Estimate]:
    """The estimate of every arm but the baseline, the null arm's included.

    losses   per arm one value a seed [n], the same seeds in the same order, all finite; any unit, which is the margin's
    null     the arm that differs from the baseline by a perturbation far below any recipe's: it is the second control,
             and is itself judged alone, by its own t, against the baseline
    maximum  the study is looked at after each seed, in the given order, and has at most so many
    waiting  arms of the study that are not here yet; the intervals leave room for them

    An arm's gap is to the mean of the controls. Its standard error is sqrt(max(v, (1 + 1 / c) MS) / n): v the
    variance of its gaps, c the number of controls, MS the residual mean square of arms x seeds with all arms. A
    single arm under test has v alone. Raises ValueError for arrays that are not finite, or of other shapes; UserError
    for a maximum below n.
    """
    arrays = equal_shapes(losses, 1)
    controls = [name for name in (baseline, null) if name is not None]
    arms = [name for name in arrays if name not in controls]
    stacked = np.stack([arrays[name] for name in (*controls, *arms)])
    n = stacked.shape[-1]
    judged = {}
    if null is not None:
        alone = WholeRuns(arms=1, controls=1, maximum=maximum)
        judged |= estimates([null], partial(fit_whole_runs, stacked[:2], 1), alone, n, margin)
    if arms:
        design = WholeRuns(arms=len(arms), controls=len(controls), maximum=maximum, waiting=waiting)
        judged |= estimates(arms, partial(fit_whole_runs, stacked, len(controls)), design, n, margin)
    return {name: judged[name] for name in arrays if name in judged}


def fit_whole_runs(losses: np.ndarray, controls: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaps and standard errors [..., k] after the first n seeds; losses [..., controls + k, seeds], the controls
    first."""
    seen = losses[..., :n]
    gaps = seen[..., controls:, :] - seen[..., :controls, :].mean(-2, keepdims=True)
    if n < 2:
        return gaps.mean(-1), np.full(gaps.shape[:-1], np.nan)
    variance = gaps.var(-1, ddof=1)
    if gaps.shape[-2] > 1:
        rows, columns = seen.mean(-1, keepdims=True), seen.mean(-2, keepdims=True)
        residual = seen - rows - columns + seen.mean((-2, -1), keepdims=True)
        mean_square = (residual**2).sum((-2, -1)) / ((seen.shape[-2] - 1) * (n - 1))
        variance = np.maximum(variance, (1 + 1 / controls) * mean_square[..., None])
    return gaps.mean(-1), np.sqrt(variance / n)


def judge_forks(
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
        judged |= estimates([name], partial(fit_forks, array[None]), design, len(array), margin)
    tested = [name for name in arrays if name != null]
    untested = sum(np.isnan(judged[name].p) and judged[name].n > 1 for name in tested)
    adjusted = holm(np.array([judged[name].p for name in tested]), together - untested)
    for name, p in zip(tested, adjusted, strict=True):
        judged[name] = replace(judged[name], p=float(p))
    return judged


def _together(arrays: Mapping[str, np.ndarray], null: str | None, arms: int | None) -> int:
    """The number of arms whose intervals hold together: `arms`, and at least the arms under test that are here."""
    return max(arms or 1, sum(name != null for name in arrays))


def fit_forks(gaps: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
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


@dataclass(frozen=True, kw_only=True)
class Weights:
    """[points]: the weights of a trunk's gaps in the gap of a whole run, in the part at once, and in the growth by each
    step since the fork."""

    whole: np.ndarray
    at_once: np.ndarray
    growth: np.ndarray


def weights(ages: ArrayLike, whole: float) -> Weights:
    """The weights of a least-squares line.

    ages   [points]: steps since the fork, at least two different ones
    whole  steps of a whole run that ends at the same step

    Raises ValueError for fewer than two different ages, or one beyond `whole`.
    """
    steps = np.asarray(ages, dtype=np.float64)
    if steps.ndim != 1 or len(np.unique(steps)) < 2 or not np.isfinite(steps).all():
        raise ValueError(f"a line needs at least two different ages, and got {steps}")
    if steps.max() > whole or steps.min() <= 0:
        raise ValueError(f"ages lie above 0 and at most at the {whole:g} steps of a whole run, and got {steps}")
    centred = steps - steps.mean()
    growth = centred / (centred**2).sum()
    at_once = 1 / len(steps) - steps.mean() * growth
    return Weights(whole=at_once + whole * growth, at_once=at_once, growth=growth)
