"""Verdicts on runs from scratch: blocked by seed, against the mean of baseline and null arm, with guarded pooling.

A t of few degrees of freedom errs where an arm's own variance is small by luck, so the variance pooled over all arms
is a floor for it; the pooled one errs for an arm louder than the rest, so the arm's own is a floor too. Both cost
degrees of freedom (designs.WholeRuns.df). Plain pooling makes 9 to 24 % false claims where variances differ.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from hqsweep.verdicts.designs import WholeRuns
from hqsweep.verdicts.estimate import Estimate
from hqsweep.verdicts.looks import equal_shapes, estimates


def judge(
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
        judged |= estimates([null], partial(fit, stacked[:2], 1), alone, n, margin)
    if arms:
        design = WholeRuns(arms=len(arms), controls=len(controls), maximum=maximum, waiting=waiting)
        judged |= estimates(arms, partial(fit, stacked, len(controls)), design, n, margin)
    return {name: judged[name] for name in arrays if name in judged}


def fit(losses: np.ndarray, controls: int, n: int) -> tuple[np.ndarray, np.ndarray]:
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
