"""The largest of k equicorrelated t values: the chance that it exceeds a bound, and the bound for a chance.

T_i = (sqrt(1 - r) Z_i + sqrt(r) Z_0) / S with independent standard normal Z and S^2 ~ chi2(df) / df: statistics of k
arms that share their baseline and their estimate of the variance. By quadrature, so that the same data give the same
verdict in every digit (scipy's multivariate_t draws random points). df need not be an integer.
"""

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy import optimize, special

from hqsweep.memo import memo

POINTS = 600
"""The number of points of S. They lie at the quantiles u = w^4 of evenly spaced w: the tail of T is made by small S.
With evenly spaced u a tail of 4e-5 comes out as 4e-6; so it is right to 3 digits down to 1e-11."""
NODES, WEIGHTS = hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def tail(bound: float, arms: int, correlation: float, df: float) -> float:
    """P(max |T_i| > bound) for `arms` values with this correlation in [0, 1)."""
    if arms == 1:
        return float(2 * special.stdtr(df, -abs(bound)))
    scales, weights = _scales(df)
    common, own = np.sqrt(correlation) * NODES, np.sqrt(1 - correlation)
    outside = special.ndtr((common - bound * scales) / own) + special.ndtr((-common - bound * scales) / own)
    return float(weights @ (-np.expm1(arms * np.log1p(-np.minimum(outside, 1 - 1e-16))) @ WEIGHTS))


@memo
def critical(level: float, arms: int, correlation: float, df: float) -> float:
    """The bound that max |T_i| exceeds with probability `level`, at most 0.05."""
    one = -float(special.stdtrit(df, level / 2))
    if arms == 1:
        return one
    bonferroni = -float(special.stdtrit(df, level / (2 * arms)))
    return optimize.brentq(lambda bound: tail(bound, arms, correlation, df) - level, 0.99 * one, 1.01 * bonferroni)


@memo
def _scales(df: float) -> tuple[np.ndarray, np.ndarray]:
    """The values of S [POINTS, 1], and their weights [POINTS]."""
    even = (np.arange(POINTS) + 0.5) / POINTS
    scales = np.sqrt(2 * special.gammaincinv(df / 2, even**4) / df)
    return scales[:, None], 4 * even**3 / POINTS
