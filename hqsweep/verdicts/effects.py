"""Main effects and two-way interactions of factors at two levels, from the gaps of a factorial study's arms.

An effect is a weighted sum of a replicate's gaps, and the replicates (trunks, or seeds) give its standard error. With
few of them an own variance is small by luck, so the variance pooled over the effects of the same order is a floor for
it, as in hqsweep.verdicts.judging; the own one is a floor where an effect varies more from trunk to trunk than the
others. The intervals hold together for all effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hqsweep.verdicts.designs import critical_of_largest, tail_of_largest
from hqsweep.verdicts.estimate import LEVEL

FIRST = 3
"""The fewest replicates of a claim."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect in the unit of the gaps.

    factors    indices: one of a main effect, two of an interaction
    value      main: the mean gap at the high level minus the mean gap at the low one. Interaction: what both at their
               high levels cost beyond the sum of each alone, gap(11) - gap(10) - gap(01) + gap(00)
    n, se      replicates, and standard error, NaN for one replicate
    low, high  95 % interval, joint over all effects
    p          of no effect, adjusted for their number
    """

    factors: tuple[int, ...]
    value: float
    n: int
    se: float
    low: float
    high: float
    p: float

    @property
    def resolved(self) -> bool:
        """Whether the interval over FIRST replicates or more leaves 0 out."""
        return self.n >= FIRST and (self.low > 0 or self.high < 0)


def contrasts(levels: ArrayLike, effects: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[effects, arms]: the weights of the arms' gaps in each effect, by least squares.

    levels   [arms, factors]: 0 or 1
    effects  sets of factors, as indices

    Raises ValueError where these arms do not tell the effects apart.
    """
    signs = 2 * np.asarray(levels, dtype=np.float64) - 1
    columns = np.stack([np.ones(len(signs)), *(signs[:, list(effect)].prod(1) for effect in effects)], axis=1)
    if np.linalg.matrix_rank(columns) < columns.shape[1]:
        raise ValueError(f"{len(signs)} arms do not tell {len(effects)} effects apart")
    scale = np.array([2.0 ** len(effect) for effect in effects])
    return scale[:, None] * np.linalg.pinv(columns)[1:]


def fit(gaps: np.ndarray, weights: np.ndarray, orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, standard errors) [..., effects]; gaps [..., replicates, arms], weights as contrasts() returns them, and
    orders [effects] the number of factors of each."""
    sums = gaps @ weights.T
    n = sums.shape[-2]
    if n < 2:
        return sums.mean(-2), np.full(sums.shape[:-2] + sums.shape[-1:], np.nan)
    norms = (weights**2).sum(-1)
    variance = sums.var(-2, ddof=1) / norms
    for order in np.unique(orders):
        same = orders == order
        pooled = variance[..., same].mean(-1, keepdims=True)
        variance[..., same] = np.maximum(variance[..., same], pooled)
    return sums.mean(-2), np.sqrt(variance * norms / n)


def freedom(count: int, replicates: int) -> float:
    """The degrees of freedom of a guarded standard error, for `count` effects. The factors are the largest under which,
    over the simulated studies of three replicates and more, about 5 % at most claim an effect without any, also where
    one effect varies 36 times as much as the others."""
    factor = 1.0 if count < 4 else 1.5 if count < 10 else 2.0
    return factor * (replicates - 1)


def critical(count: int, replicates: int) -> float:
    """The standard errors between an effect and the ends of its interval, joint over `count` effects."""
    return critical_of_largest(LEVEL, count, 0.0, freedom(count, replicates))


def judge_effects(gaps: ArrayLike, levels: ArrayLike, effects: Sequence[tuple[int, ...]]) -> list[Effect]:
    """The effects of a factorial study.

    gaps     [replicates, arms]: arm minus any one reference of the same replicate, which cancels; all finite
    levels   [arms, factors]: 0 or 1
    effects  as fractions.Fraction.effects() names them

    Raises ValueError for gaps that are not finite, and arms that do not tell the effects apart.
    """
    array = np.asarray(gaps, dtype=np.float64)
    if array.ndim != 2 or not np.isfinite(array).all():
        raise ValueError("gaps must be finite and have 2 dimensions, replicates and arms")
    weights = contrasts(levels, effects)
    n, orders = len(array), np.array([len(effect) for effect in effects])
    values, errors = fit(array, weights, orders)
    half = critical(len(effects), n) * errors if n > 1 else np.full(len(effects), np.nan)
    df = freedom(len(effects), n)
    found = []
    for effect, value, error, wide in zip(effects, values, errors, half, strict=True):
        p = tail_of_largest(abs(value) / error, len(effects), 0.0, df) if error > 0 else float("nan")
        found.append(
            Effect(factors=effect, value=float(value), n=n, se=float(error), low=float(value - wide),
                   high=float(value + wide), p=p)
        )  # fmt: skip
    return found
