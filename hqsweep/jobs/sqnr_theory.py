"""The SQNR that a format must have on independent draws of a density, by integration instead of by quantizing.

A block of B elements with largest magnitude a gets the scale s(a). The largest element is a itself and the others have
the density cut off at a, so

    MSE(a) = ((a - Q(a))^2 + (B - 1) * integral from 0 to a of (x - Q(x))^2 f(x) dx / M_0(a)) / B

and SQNR = 10 log10(E[x^2] / E[MSE(a)]), with a distributed as M_0^B. Between the midpoints of its neighbours a code of
value v contributes M_2 - 2 v M_1 + v^2 M_0; stochastic rounding between q- and q+ contributes (x - q-)(q+ - x). Grids
of elements and rules of scales are written down here again, from their specifications, in numpy float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

from hqsweep.formats import MX, Format

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Density:
    """A symmetric density: partial moments of |x|, its quantile function, and E[x^2]."""

    moments: Callable[[Array], tuple[Array, Array, Array]]
    quantile: Callable[[Array], Array]
    """x with M_0(x) = 1 - p, for the tail p of |x|. The largest magnitudes need tails for which 1 - p rounds to 1."""
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
    """Moments of Student's t. Since x^2 = nu (1 + x^2 / nu) - nu, M_2 is an integral over the density with nu - 2
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


ELEMENTS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0), "e2m3": (3, 0, 7.5), "e3m2": (2, -2, 28.0),
            "e2m1": (1, 0, 6.0), "e1m2": (2, 1, 3.5), "int8": (6, 6, 127.0), "e5m3": (3, -14, 114688.0),
            "bf16": (7, -24, 2.0**16), "fp16": (10, -14, 65504.0)}  # fmt: skip
"""Element -> (mantissa bits, exponent of the smallest normal value, largest value), from OCP OFP8, OCP MX v1.0 and IEEE
754 binary16."""
TAIL = np.append(np.linspace(1, 0.004, 1024), np.geomspace(0.004, 1e-8, 513)[1:])
"""Shares of blocks with a larger a, between which MSE(a) is taken. In the tail they are ratios, as heavy densities err
there."""


def theoretical_sqnr_db(
    format: Format, distribution: str, rows: int, cols: int, amax: float | None = None
) -> float | None:
    """The SQNR in dB of a matrix [rows, cols]; None for a density or a format without a closed form.

    4over6 has none, as it chooses by block, and +eden has none, as it corrects by group. The Hadamard transform keeps
    only the normal density, and fp32 has no error worth the name.

    amax: the matrix's own, after the transform, where it is known. Under one scale for all, a single value decides the
    error of 4-bit codes.
    """
    density = DENSITIES.get(distribution)
    if density is None or str(format) == "fp32" or format.four_over_six or format.rht_drawn:
        return None
    if format.rht and distribution != "normal":
        return None
    size = _block(format, rows, cols)
    one = format.high_precision  # one scale for all
    tail, weights = (np.array([0.5]), np.ones(1)) if one else (np.sqrt(TAIL[1:] * TAIL[:-1]), -np.diff(TAIL))
    most = largest(density, size, 1 - tail)
    if amax is not None and format.scaling == "tensor":
        most, weights = np.array([amax]), np.ones(1)
    mse = _mean_squared_error(format, density, _scales(format, density, most, rows, cols), most, size)
    return 10 * math.log10(density.power * weights.sum() / (mse @ weights))


def largest(density: Density, count: int, share: Array) -> Array:
    """Quantiles of the largest of `count` draws: M_0(a)^count = share, by the tail 1 - share^(1 / count)."""
    return density.quantile(-np.expm1(np.log(share) / count))


def _block(format: Format, rows: int, cols: int) -> int:
    """The number of elements that share a scale."""
    down, across = (0, 0) if format.high_precision else format.tile
    return (down or rows) * (across or cols)


def _scales(format: Format, density: Density, amax: Array, rows: int, cols: int) -> Array:
    """The scales s, value = code * s, of blocks with this largest magnitude."""
    match format.scaling:
        case None:
            return np.ones_like(amax)
        case "nvfp4":
            count = cols if format.row_scaled else rows * cols
            top = np.maximum(largest(density, count, np.array([0.5])), amax) / (format.element.max * 448)
            return _round(amax / (format.element.max * top), _grid("e4m3")) * top
        case "ue5m3":
            return _round(amax / format.element.max, _grid("e5m3"))
        case "mx":
            return _mx_scale(format, amax)
        case "tensor" | "row" | "block" | "int_row" | "int_block" if not format.delayed:
            scale = amax / format.element.max
            return np.exp2(np.ceil(np.log2(scale))) if format.pow2 else scale
    raise TypeError(f"no closed form of the scales of {format}")


def _mx_scale(format: MX, amax: Array) -> Array:
    """Up: the smallest power of two that saturates nothing; floor: OCP MX v1.0 section 6.3; even, ceil: torchao's."""
    mantissa, _, top = ELEMENTS[format.element_name]
    if format.scale_rounding == "up":
        return np.exp2(np.ceil(np.log2(amax / top)))
    if format.scale_rounding == "ceil":
        return np.exp2(np.ceil(np.log2(amax)) - math.floor(math.log2(top)))
    if format.scale_rounding == "even":
        step = np.exp2(np.floor(np.log2(amax)) - mantissa)
        amax = np.floor(amax / step + 0.5) * step
    return np.exp2(np.floor(np.log2(amax)) - math.floor(math.log2(top)))


@cache
def _grid(element: str) -> Array:
    """All values >= 0 of an element type, ascending."""
    mantissa, low, top = ELEMENTS[element]
    below = np.arange(2**mantissa) * 2.0 ** (low - mantissa)
    binades = np.arange(low, math.floor(math.log2(top)) + 1)
    normal = (1 + np.arange(2**mantissa) / 2**mantissa)[None, :] * np.exp2(binades)[:, None]
    grid = np.concatenate([below, normal.ravel()])
    return grid[grid <= top]


def _round(x: Array, grid: Array) -> Array:
    """The value closest to x >= 0. Ties have measure zero here."""
    return grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, x)]


def _mean_squared_error(format: Format, density: Density, scale: Array, amax: Array, size: int) -> Array:
    """MSE(a) for blocks of `size` elements with these scales and largest magnitudes."""
    grid = _grid(format.element_name)
    values = scale[:, None] * grid
    if format.stochastic:
        error, last = _stochastic(density, values, amax), _stochastic_error(amax / scale, grid) * scale**2
    else:
        error, last = _rounded(density, values, amax), (amax - scale * _round(amax / scale, grid)) ** 2
    return (last + (size - 1) * error / density.moments(amax)[0]) / size


def _rounded(density: Density, values: Array, amax: Array) -> Array:
    """The integral of (x - Q(x))^2 f up to amax. Each value takes the interval between the midpoints to its
    neighbours."""
    edges = np.pad((values[:, 1:] + values[:, :-1]) / 2, ((0, 0), (1, 0)))
    m0, m1, m2 = _cells(density, np.append(edges, amax[:, None], axis=1), amax)
    return (m2 - 2 * values * m1 + values**2 * m0).sum(axis=1)


def _stochastic(density: Density, values: Array, amax: Array) -> Array:
    """The integral of (x - q-)(q+ - x) f up to the top value, and of (x - top)^2 f from there to amax."""
    m0, m1, m2 = _cells(density, np.append(values, amax[:, None], axis=1), amax)
    low, high, top = values[:, :-1], values[:, 1:], values[:, -1]
    between = ((low + high) * m1[:, :-1] - low * high * m0[:, :-1] - m2[:, :-1]).sum(axis=1)
    return between + m2[:, -1] - 2 * top * m1[:, -1] + top**2 * m0[:, -1]


def _stochastic_error(x: Array, grid: Array) -> Array:
    """(x - q-)(q+ - x), or (x - top)^2 above the top."""
    place = np.clip(np.searchsorted(grid, x) - 1, 0, len(grid) - 2)
    return np.where(x > grid[-1], (x - grid[-1]) ** 2, (x - grid[place]) * (grid[place + 1] - x))


def _cells(density: Density, edges: Array, amax: Array) -> list[Array]:
    """The partial moments between neighbouring edges. No edge may lie beyond amax."""
    return [np.diff(moment, axis=1) for moment in density.moments(np.minimum(edges, amax[:, None]))]
