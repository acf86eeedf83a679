"""Verdicts from gaps and standard errors: at one look, or at looks after each replicate of a growing study."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from hqsweep.verdicts import levels, plan
from hqsweep.verdicts.designs import Design
from hqsweep.verdicts.estimate import Estimate

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
        levels.check(n, design.maximum)
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
