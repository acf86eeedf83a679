"""Forks that end together: the gap of a whole run from forks of several ages.

A fork has a smaller gap than a whole run that ends at the same step. One part of a gap comes with the switch; the rest
grows with age, the steps since the fork. Forks of one trunk that end at
one step see the same tokens, so that age is all that tells their gaps apart; a straight line through gap against age is
at age 0 the part that comes at once, and at the age of a whole run its gap. Each of these is a weighted sum of a
trunk's gaps, and is judged over trunks as their mean is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


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
