"""The calibrate job's errors of formats on matrices of known distributions, beside theory and published values.

normal, laplace, t5, t3   independent draws, whose error is integrated
outlier_channels          N(0, 1) with one channel in a hundred 30 times as large
token_scale_S             N(0, 1) with a factor exp(S z) for each row, z at the quantiles of N(0, 1) in random order

SQNR in theory, by integration instead of by quantizing: of independent draws of a density.

A block of B elements with largest magnitude a gets the scale s(a). The largest element is a itself and the others have
the density cut off at a, so

    MSE(a) = ((a - Q(a))^2 + (B - 1) * integral from 0 to a of (x - Q(x))^2 f(x) dx / M_0(a)) / B

and SQNR = 10 log10(E[x^2] / E[MSE(a)]), with a distributed as M_0^B. Between the midpoints of its neighbours a code of
value v contributes M_2 - 2 v M_1 + v^2 M_0; stochastic rounding between q- and q+ contributes (x - q-)(q+ - x). Grids
of elements and rules of scales are written down here again, from their specifications, in numpy float64.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hqsweep.config.job import CALIBRATE_DISTRIBUTIONS
from hqsweep.formats import MX, Format, RngKey, parse
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target

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
            "e2m1": (1, 0, 6.0), "bf16": (7, -24, 2.0**16), "fp16": (10, -14, 65504.0)}  # fmt: skip
"""Element -> (mantissa bits, exponent of the smallest normal value, largest value), from OCP OFP8, OCP MX v1.0 and IEEE
754 binary16."""
TAIL = np.append(np.linspace(1, 0.004, 1024), np.geomspace(0.004, 1e-8, 513)[1:])
"""Shares of blocks with a larger a, between which MSE(a) is taken. In the tail they are ratios, as heavy densities err
there."""


def theoretical_sqnr_db(
    format: Format, distribution: str, rows: int, cols: int, amax: float | None = None
) -> float | None:
    """The SQNR in dB of a matrix [rows, cols]; None for a density or a format without a closed form.

    4over6 has none, as it chooses by block. The Hadamard transform keeps only the normal density, and fp32 has no error
    worth the name.

    amax: the matrix's own, after the transform, where it is known. Under one scale for all, a single value decides the
    error of 4-bit codes.
    """
    density = DENSITIES.get(distribution)
    if density is None or str(format) == "fp32" or format.four_over_six:
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
            top = np.maximum(largest(density, count, np.array([0.5])), amax) / (6 * 448)
            return _round(amax / (6 * top), _grid("e4m3")) * top
        case "mx":
            return _mx_scale(format, amax)
        case "tensor" | "block" if not format.delayed:
            scale = amax / format.element.max
            return np.exp2(np.ceil(np.log2(scale))) if format.pow2 else scale
    raise TypeError(f"no closed form of the scales of {format}")


def _mx_scale(format: MX, amax: Array) -> Array:
    """Up: the smallest power of two that saturates nothing; floor, even: OCP MX v1.0 section 6.3, torchao's EVEN."""
    mantissa, _, top = ELEMENTS[format.element_name]
    if format.scale_rounding == "up":
        return np.exp2(np.ceil(np.log2(amax / top)))
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


STATISTICS = ("row_sqnr_db_median", "row_sqnr_db_p5", "underflow_pct")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An expected number of decibels, its origin (theory, published, emulated, predicted), and the range that
    passes."""

    source: str
    expected_db: float
    low_db: float
    high_db: float

    @classmethod
    def around(cls, source: str, expected_db: float, tolerance_db: float) -> Self:
        return cls(
            source=source, expected_db=expected_db, low_db=expected_db - tolerance_db,
            high_db=expected_db + tolerance_db,
        )  # fmt: skip


def calibration_row(
    check: str,
    subject: str,
    case: str,
    measured_db: float,
    expected: Expectation | None,
    statistics: Mapping[str, float] | None = None,
) -> dict[str, object]:
    """Return a row with PASS from low_db to high_db, else FAIL; SKIP without an expectation.

    statistics: the statistics of the matrix. Median and 5th percentile of the rows' SQNR, and the underflow, are
    kept.
    """
    row: dict[str, object] = {"check": check, "subject": subject, "case": case, "measured_db": measured_db}
    row |= {name: statistics[name] if statistics else None for name in STATISTICS}
    if expected is None:
        nothing = dict.fromkeys(("source", "expected_db", "low_db", "high_db"))
        return row | nothing | {"status": "SKIP", "note": "no closed form and no published value"}
    good = expected.low_db <= measured_db <= expected.high_db
    note = None if good else (
        f"measured {measured_db:.2f} dB; {expected.source} {expected.expected_db:.2f} dB, which allows"
        f" {expected.low_db:.2f} to {expected.high_db:.2f}"
    )  # fmt: skip
    limits = {"expected_db": expected.expected_db, "low_db": expected.low_db, "high_db": expected.high_db}
    finite = {name: value if math.isfinite(value) else None for name, value in limits.items()}
    return row | finite | {"source": expected.source, "status": "PASS" if good else "FAIL", "note": note}


PUBLISHED_MSE = {"nvfp4": 9.0, "nvfp4+4over6+mse": 7.6, "nvfp4+2d": 12.4}
COLUMNS = ("normal", "laplace", "t5", "t3", "outlier_channels", "token_scale_2")
TABLE = """
bf16                    55.59 55.6 55.6 55.6      55.6      55.6
fp8_current             31.54 31.5 31.5 31.7(0.2) 31.6      31.6(0.1)
fp8_current+e5m2        25.56 25.6 25.6 25.6(0.1) 25.5      25.6
fp8_block               31.52 31.5 31.5 31.6(0.1) 31.5      31.5
fp8_block+fp32_scale    31.79 32.1 32.2 33.1(0.2) 36.9(0.3) 31.8
fp8_block+2d            31.52 31.5 31.5 31.6(0.1) 31.5      31.5
fp8_block+2d+fp32_scale 31.55 31.5 31.6 31.9(0.2) 31.6      31.7
mxfp8                   31.52 31.5 31.5 31.6(0.1) 31.5      31.5
mxfp8+e5m2              25.54 25.6 25.6 25.5(0.1) 25.6      25.6
mxfp8+floor             30.64 30.0 30.1 29.4(0.4) 28.1      30.3(0.1)
mxfp8+even              31.18 30.8 30.8 30.6(0.1) 29.7      30.9(0.2)
mxfp4                   18.76 17.6 17.5 16.5(0.1) 16.2      18.7
mxfp4+floor             18.79 17.9 18.0 17.0(0.1) 15.8      18.7
mxfp4+even              19.03 18.1 18.2 17.2(0.1) 16.5      19.0
nvfp4                   20.44 20.7 20.7 20.9(0.2) 21.8      20.4
nvfp4+2d                19.07 17.8 17.3 14.9(0.1) 16.5(0.1) 18.2(0.8)
nvfp4+rht               20.44 20.3 20.4 20.2(0.2) 19.0(0.1) 20.4
nvfp4+sr                17.25 17.4 17.4 17.5      17.5      17.2(0.1)
nvfp4+2d+sr             15.97 14.7 14.2 11.6      12.0(0.1) 14.2(1.0)
nvfp4+row_scaled        20.43 20.7 20.7 21.0(0.2) 21.8      20.4
nvfp4+4over6+mse        21.21 21.2 21.2 21.3(0.1) 22.0      21.2
"""
ROWS: dict[str, dict[str, float]] = {
    "token_scale_2": {
        "fp8_current": 31.5, "fp8_current+e5m2": 25.6, "fp8_block+2d": 31.5, "fp8_block+fp32_scale": 31.8,
        "mxfp8": 31.5, "nvfp4": 20.4, "nvfp4+row_scaled": 20.4, "nvfp4+2d": 0.2,
    },
    "token_scale_4": {
        "fp8_current+e5m2": 25.5, "fp8_block+fp32_scale": 31.8, "mxfp8": 31.5, "nvfp4+row_scaled": 20.4,
        "nvfp4+2d": 0.0,
    },
}  # fmt: skip
"""Format -> SQNR of the distribution. Formats whose tensor scale underflows half of the rows are left out, because
their median depends on one draw of the largest magnitude."""


def published_db(format: str, distribution: str) -> float | None:
    """The SQNR of Quartet II on N(0, 1), or None."""
    mse = PUBLISHED_MSE.get(format) if distribution == "normal" else None
    return None if mse is None else -10 * math.log10(mse * 1e-3)


def emulated_db(format: str, distribution: str) -> tuple[float, float] | None:
    """(mean, standard deviation), or None."""
    return EMULATED.get((format, distribution))


def _cell(text: str) -> tuple[float, float]:
    mean, _, deviation = text.rstrip(")").partition("(")
    return float(mean), float(deviation or 0)


EMULATED = {
    (name, column): _cell(cell)
    for name, *cells in map(str.split, TABLE.strip().splitlines())
    for column, cell in zip(COLUMNS, cells, strict=True)
}


ROUNDED_DB = 0.1
"""The tolerance, in dB, for the rounding of published numbers, and for one draw."""
CHOICE_DB = {"outlier_channels": 0.2, "token_scale_2": 0.2}
"""The tolerance of the emulation, in dB. It covers which channels or rows are large, and where their scales fall."""
DRAW_DB = {"normal": 0.05, "laplace": 0.05, "t5": 0.06, "t3": 0.4}
"""The tolerance of theory, in dB, for one draw of 2 million. t3 has no fourth moment, so its power is uncertain."""


def _outlier_channels(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    x = rng.standard_normal((rows, cols))
    x[:, rng.choice(cols, max(1, cols // 100), replace=False)] *= 30
    return x


def _token_scale(sigma: float) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    def draw(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        z = rng.permutation(stats.norm.ppf((np.arange(rows) + 0.5) / rows))
        return rng.standard_normal((rows, cols)) * np.exp(sigma * z)[:, None]

    return draw


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda rng, rows, cols: rng.standard_normal((rows, cols)),
    "laplace": lambda rng, rows, cols: rng.laplace(size=(rows, cols)),
    "t5": lambda rng, rows, cols: rng.standard_t(5, (rows, cols)),
    "t3": lambda rng, rows, cols: rng.standard_t(3, (rows, cols)),
    "outlier_channels": _outlier_channels,
    "token_scale_2": _token_scale(2),
    "token_scale_4": _token_scale(4),
}
assert tuple(DISTRIBUTIONS) == CALIBRATE_DISTRIBUTIONS, "the names stand in config/job.py, in this order"


def draw(distribution: str, rows: int, cols: int, seed: int) -> Tensor:
    """float32 [rows, cols]; the same bits for the same arguments."""
    name = int.from_bytes(hashlib.sha256(distribution.encode()).digest()[:4], "little")
    values = DISTRIBUTIONS[distribution](np.random.default_rng([seed, name]), rows, cols)
    return torch.from_numpy(values).float()


def sqnr_rows(
    formats: Sequence[str], distribution: str, shape: tuple[int, int], seed: int, device: torch.device
) -> Iterator[dict[str, object]]:
    """The rows of every format on one matrix: one row for each expectation."""
    x = draw(distribution, *shape, seed).to(device)
    for format in map(parse, formats):
        key = RngKey(seed=seed, slot=f"calibrate/{distribution}", step=0)
        measured = quantize(x, Target(format, key=key), statistics=True).rowwise_statistics.row()
        known = list(expectations(format, distribution, shape, measured["amax"]))
        for expected in known or [None]:
            yield calibration_row("sqnr", str(format), distribution, measured["sqnr_db"], expected, measured)
        if (median := ROWS.get(distribution, {}).get(str(format))) is not None:
            expected = Expectation.around("emulated", median, 2 * ROUNDED_DB)
            yield calibration_row(
                "row median", str(format), distribution, measured["row_sqnr_db_median"], expected, measured
            )


def expectations(
    format: Format, distribution: str, shape: tuple[int, int], amax: float | None = None
) -> Iterator[Expectation]:
    """The expectations for a format, as far as they exist: theory, a published number, and an independent emulation.

    Theory is for matrices with this amax, or for all matrices.
    """
    if (theory := theoretical_sqnr_db(format, distribution, *shape, amax)) is not None:
        yield Expectation.around("theory", theory, DRAW_DB[distribution])
    if (published := published_db(str(format), distribution)) is not None:
        yield Expectation.around("published", published, ROUNDED_DB)
    if (emulated := emulated_db(str(format), distribution)) is not None:
        mean, deviation = emulated
        yield Expectation.around("emulated", mean, ROUNDED_DB + CHOICE_DB.get(distribution, 0) + 3 * deviation)
