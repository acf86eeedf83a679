"""Densities whose quantization error has a closed form, by the partial moments of |x|.

M_n(x) = integral from 0 to x of t^n f(t) dt, where f is the density of |x|, for n = 0, 1, 2. numpy and scipy only:
nothing here is shared with the quantizers that it is used to judge.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Density:
    """A symmetric density: partial moments of |x|, its quantile function, and E[x^2]."""

    moments: Callable[[Array], tuple[Array, Array, Array]]
    quantile: Callable[[Array], Array]
    """x with M_0(x) = 1 - p, for the tail p of |x|: the largest magnitudes need tails that 1 - p cannot hold."""
    power: float


def _normal_moments(x: Array) -> tuple[Array, Array, Array]:
    """Moments of the normal: 2 Phi - 1, 2 (phi(0) - phi(x)), M_0 - 2 x phi(x)."""
    m0, f = 1 - 2 * stats.norm.sf(x), 2 * stats.norm.pdf(x)
    return m0, 2 * stats.norm.pdf(0) - f, m0 - x * f


def _laplace_moments(x: Array) -> tuple[Array, Array, Array]:
    """Moments of f = exp(-x): 1 - e, 1 - (1 + x) e, 2 - (x^2 + 2 x + 2) e, with e = exp(-x)."""
    e = np.exp(-x)
    return -np.expm1(-x), 1 - (1 + x) * e, 2 - (x * x + 2 * x + 2) * e


def _student_moments(nu: int) -> Callable[[Array], tuple[Array, Array, Array]]:
    """Moments of Student's t: since x^2 = nu (1 + x^2 / nu) - nu, M_2 is an integral over its density with nu - 2
    degrees of freedom."""

    def moments(x: Array) -> tuple[Array, Array, Array]:
        m0, top = 1 - 2 * stats.t.sf(x, nu), 2 * stats.t.pdf(0, nu)
        m1 = top * nu / (nu - 1) * (1 - (1 + x * x / nu) ** (-(nu - 1) / 2))
        wide = np.sqrt(nu / (nu - 2))
        below = stats.t.cdf(x / wide, nu - 2) - 0.5
        return m0, m1, nu * (top / stats.t.pdf(0, nu - 2) * wide * below - m0)

    return moments


def _student(nu: int) -> Density:
    return Density(moments=_student_moments(nu), quantile=lambda p: stats.t.isf(p / 2, nu), power=nu / (nu - 2))


DENSITIES: dict[str, Density] = {
    "normal": Density(moments=_normal_moments, quantile=lambda p: stats.norm.isf(p / 2), power=1.0),
    "laplace": Density(moments=_laplace_moments, quantile=lambda p: -np.log(p), power=2.0),
    "t5": _student(5),
    "t3": _student(3),
}
