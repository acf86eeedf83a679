"""Error statistics of a quantized tensor, or of a GEMM's output, as plain floats.

sqnr_db        10 log10(sum x^2 / sum (x - Qx)^2)
rel_l2         sqrt(sum (x - Qx)^2 / sum x^2)
cosine         <x, Qx> / (|x| |Qx|)
amax           largest |x|; a NaN does not count
underflow_pct  share of non-zero x with Qx = 0, in percent
saturation_pct share of x more than 2^-8 beyond the largest value its block can hold, in percent
scale_min/max  smallest non-zero and largest decode scale of a block, global factor included
scale_bias     b in Qx = (1 + b) x + noise over the elements that are not lost, by least squares; below 0: Qx is shrunk
dead_zone_error_pct, scale_error_pct, grid_error_pct
               parts of the squared error in percent, 100 together: x^2 of the lost elements; b^2 sum x^2 over the other
               elements; and the rest, the noise of the grid
row_sqnr_db_*  median and 5th percentile of the SQNR of single rows, rows of zeros left out
exact_tiles_pct
               of a projected weight: share of the host's tiles whose values are the projected ones, in percent

All of them follow from sums, minima and maxima, and row_sqnr_db_* from the sums over each operand row. So the sums of
several parts can be joined. Parts may be pieces of one matrix, or matrices quantized one after the other (microbatches,
ranks with other tokens). Each part has its own scales and amaxes.

Kernels sum tiles of 128 x 128 elements in float32 while they quantize. The reference, gather(), sums them in float64.
Both add up the tiles in float64. If squares exceed float32, the kernels' ratios are NaN. gather_by_row() covers formats
without such a kernel, in fewer passes than the reference.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from hqsweep.formats import Buffers, Format, RngKey
from hqsweep.formats.base import expand_tiles, tile_amax
from hqsweep.ops.quantize.kernels import TILE

SATURATION_MARGIN = 1 + 2.0**-8
"""A block saturates if its amax exceeds its top code times this. Rounded scales put the amax up to an ulp above."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Sums over one operand. The tensors stay on the device until row() reads them."""

    sums: Tensor
    """[tiles of X in row-major order, or operand rows, 8]: x^2, error^2, q^2, amax; counts of non-zero, lost and
    saturated elements; x^2 of the lost ones."""
    row_errors: Tensor
    """[operand rows, tiles across, or 1]: sums of (x - Qx)^2 over 128 elements of a row, or over the row."""
    elements: int
    x: Tensor | None
    """The quantized matrix in the operand's orientation. Reading it again gives each row's power, so it must not
    change.

    None for an operand made from decoded values, which are not kept: its rows' SQNR is NaN.
    """
    format: Format
    buffers: Buffers | None
    """The buffers whose scales are read. None: scale_min and scale_max are NaN."""

    def row(self) -> dict[str, float]:
        """Return all statistics; waits for the device."""
        return self.read().row()

    def read(self) -> "Sums":
        """Return the sums over all tiles; waits for the device."""
        totals = self.sums.double().sum(dim=0)
        if self.sums.shape[0]:
            totals[3] = self.sums[:, 3].max()
        scales = None if self.buffers is None else self.format.value_scales(self.buffers)
        return Sums(
            totals=totals, elements=self.elements, scales=_scale_range(scales),
            row_power=None if self.x is None else _by_row_squared(self.x),
            row_error=self.row_errors.double().sum(dim=1),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Float64 sums over a matrix, or over a part of a matrix."""

    totals: Tensor
    """The totals, in the columns of Statistics.sums."""
    elements: int
    scales: tuple[float, float]
    """The smallest non-zero and the largest scale; NaN without scales."""
    row_power: Tensor | None
    """[operand rows]: sums of x^2."""
    row_error: Tensor
    """[operand rows]: sums of (x - Qx)^2."""

    def joined(self, other: "Sums", *, below: bool) -> "Sums":
        """Return the sums over this part and another one.

        below: the other part adds operand rows. Otherwise it lies beside this one and extends the same rows.
        """
        totals = self.totals + other.totals
        totals[3] = torch.maximum(self.totals[3], other.totals[3])
        join = (lambda a, b: torch.cat([a, b])) if below else _added
        (low, high), (other_low, other_high) = self.scales, other.scales
        return Sums(
            totals=totals, elements=self.elements + other.elements,
            scales=(_least(min, low, other_low), _least(max, high, other_high)),
            row_power=join(self.row_power, other.row_power), row_error=join(self.row_error, other.row_error),
        )  # fmt: skip

    def to(self, device: torch.device | str) -> "Sums":
        """Return the sums on another device."""
        tensors = {name: getattr(self, name) for name in ("totals", "row_power", "row_error")}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in tensors.items()})

    def row(self) -> dict[str, float]:
        """Return all statistics."""
        x2, error2, q2, amax, nonzero, lost, saturated, lost2 = self.totals.tolist()
        return {
            **_ratios(x2, error2, q2, (x2 + q2 - error2) / 2, amax),
            "underflow_pct": 100.0 * lost / max(nonzero, 1),
            "saturation_pct": 100.0 * saturated / max(self.elements, 1),
            **dict(zip(("scale_min", "scale_max"), self.scales, strict=True)),
            **_row_quantiles(self.row_power, self.row_error),
            **_parts(x2, error2, q2, lost2),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class TileSums(Sums):
    """The sums over a projected weight."""

    exact: tuple[int, int]
    """How many tiles the host encodes exactly, and how many there are."""

    def joined(self, other: "TileSums", *, below: bool) -> "TileSums":
        """Return the sums over this part and another one."""
        exact = self.exact[0] + other.exact[0], self.exact[1] + other.exact[1]
        return TileSums(**vars(super().joined(other, below=below)), exact=exact)

    def row(self) -> dict[str, float]:
        """Return all statistics, and exact_tiles_pct."""
        return super().row() | {"exact_tiles_pct": 100.0 * self.exact[0] / max(self.exact[1], 1)}


@dataclass(frozen=True)
class OutputSums:
    """Sums over one or several GEMM outputs: x is the expected output, q the actual one."""

    x2: float
    error2: float
    q2: float
    dot: float
    amax: float

    def joined(self, other: "OutputSums", *, below: bool = True) -> "OutputSums":
        """Return the sums over this output and another one, wherever that lies."""
        sums = (a + b for a, b in zip(astuple(self)[:-1], astuple(other)[:-1], strict=True))
        return OutputSums(*sums, max(self.amax, other.amax))

    def to(self, device: torch.device | str) -> "OutputSums":
        """Return self: plain numbers are on no device."""
        return self

    def row(self) -> dict[str, float]:
        """Return sqnr_db, rel_l2, cosine, and the amax of x."""
        return _ratios(self.x2, self.error2, self.q2, self.dot, self.amax)


def output_sums(expected: Tensor, actual: Tensor) -> OutputSums:
    """Return the sums of two tensors with one shape: float32 along the last axis, float64 over the rest. Waits for the
    device once."""
    x, q = expected.float(), actual.float()
    pairs = ((x, x), (error := x - q, error), (q, q), (x, q))
    sums = [torch.linalg.vecdot(a, b).double().sum() for a, b in pairs]
    amax = _magnitude(expected).max().double() if x.numel() else sums[0]
    return OutputSums(*torch.stack([*sums, amax]).tolist())


def output_error(expected: Tensor, actual: Tensor) -> dict[str, float]:
    """Return sqnr_db, rel_l2, cosine and amax (of expected) for two tensors with one shape, by output_sums()."""
    return output_sums(expected, actual).row()


def gather(
    x: Tensor,
    format: Format,
    buffers: Buffers,
    *,
    columns: bool = False,
    keep_buffers: bool = True,
    keep_x: bool = True,
    key: RngKey | None = None,
) -> Statistics:
    """Return the statistics for buffers = encode(x, key=key), computed by torch alone.

    columns: x is X.T, and tiles are numbered as in X. keep_buffers, keep_x: whether the result holds them.
    """
    shape = tuple(x.shape)
    basis, decoded = format.basis(x, key), format.decode(buffers, shape)
    magnitude, nonzero = _magnitude(basis), basis != 0
    scale = format.value_scales(buffers)
    limit = torch.inf
    if scale is not None:
        limit = expand_tiles(scale, shape, *format.tile) * (format.element.max * SATURATION_MARGIN)
    error2 = (basis.double() - decoded.double()).square()
    summed = (basis.double().square(), error2, decoded.double().square())
    lost = nonzero & (decoded == 0)
    counted = (nonzero, lost, magnitude > limit)
    parts = [_by_tile(t).sum(dim=(1, 3)) for t in summed] + [_by_tile(magnitude.double()).amax(dim=(1, 3))]
    parts += [_by_tile(t.double()).sum(dim=(1, 3)) for t in counted]
    lost2 = _by_tile(torch.where(lost, summed[0], 0.0)).sum(dim=(1, 3))
    sums = torch.stack([*parts, lost2], dim=-1)
    if columns:
        sums = sums.transpose(0, 1)
    return Statistics(
        sums=sums.flatten(0, 1),
        row_errors=_by_row(error2),
        elements=x.numel(),
        x=x if keep_x else None,
        format=format,
        buffers=buffers if keep_buffers else None,
    )


def gather_by_row(
    x: Tensor, format: Format, buffers: Buffers, *, keep_x: bool = True, key: RngKey | None = None
) -> Statistics:
    """Return the same statistics as gather(), summed per operand row, with differences rounded to float32.

    A high-precision operand needs only one sum of squares. Its error is 0, or NaN if a value is not finite.
    """
    shape, scale = tuple(x.shape), format.value_scales(buffers)
    none = torch.zeros(shape[0], dtype=torch.float64, device=x.device)
    if format.high_precision and torch.promote_types(x.dtype, buffers["q"].dtype) == buffers["q"].dtype:
        basis, lost, lost2 = x, none, none
        power = q2 = _by_row_squared(x)
        error2 = power - power
    else:
        basis, decoded = format.basis(x, key), format.decode(buffers, shape)
        power, error2, q2 = (_by_row_squared(each) for each in (basis, basis - decoded, decoded))
        is_lost = (basis != 0) & (decoded == 0)
        lost, lost2 = _count_by_row(is_lost), _by_row_squared(torch.where(is_lost, basis, 0.0))
    magnitude, saturated = _magnitude(basis), none
    if scale is not None:
        limit = format.element.max * SATURATION_MARGIN
        saturated = _count_by_row(magnitude > expand_tiles(scale, shape, *format.tile) * limit)
    largest = magnitude.amax(dim=1).double() if shape[1] else none
    sums = (power, error2, q2, largest, _count_by_row(basis != 0), lost, saturated, lost2)
    return Statistics(
        sums=torch.stack(sums, dim=1), row_errors=error2[:, None], elements=x.numel(), x=x if keep_x else None,
        format=format, buffers=buffers,
    )  # fmt: skip


def exact_tiles(values: Tensor, format: Format, buffers: Buffers) -> tuple[int, int]:
    """Return how many tiles of an operand decode to the values [rows, cols], and how many tiles it has."""
    differs = tile_amax((format.decode(buffers, tuple(values.shape)) != values).float(), *format.tile)
    return int((differs == 0).sum()), differs.numel()


def finite_or_none(row: dict[str, float]) -> dict[str, float | None]:
    """Return the row with None in place of NaN (a missing statistic), for JSON."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def _ratios(x2: float, error2: float, q2: float, dot: float, amax: float) -> dict[str, float]:
    norms = math.sqrt(x2) * math.sqrt(q2)
    return {
        "sqnr_db": _decibel(x2, error2),
        "rel_l2": math.sqrt(error2 / x2) if x2 else math.nan,
        "cosine": dot / norms if norms else math.nan,
        "amax": amax,
    }


def _parts(x2: float, error2: float, q2: float, lost2: float) -> dict[str, float]:
    """Return scale_bias and the parts of the squared error; NaN without such elements, or without an error.

    With L = sum x^2 and E = sum (x - Qx)^2 over the elements that are not lost, sum x Qx = (L + q2 - E) / 2 there. So
    b = (q2 - L - E) / (2 L), and the error splits exactly into lost2 + b^2 L + (E - b^2 L), as x and the noise are
    orthogonal (the split of arXiv 2605.20402, by least squares over a whole tensor).
    """
    others, error = x2 - lost2, error2 - lost2
    bias = (q2 - others - error) / (2 * others) if others > 0 else math.nan
    of = error2 if error2 > 0 else math.nan
    parts = {"dead_zone": lost2, "scale": 0.0 if math.isnan(bias) else min(bias * bias * others, max(error, 0.0))}
    parts["grid"] = max(error2 - sum(parts.values()), 0.0)
    return {"scale_bias": bias, **{f"{name}_error_pct": 100.0 * part / of for name, part in parts.items()}}


def _decibel(power: float, error: float) -> float:
    if not power or not math.isfinite(power + error):
        return math.nan
    return 10 * math.log10(power / error) if error else math.inf


def _scale_range(scale: Tensor | None) -> tuple[float, float]:
    if scale is None or scale.numel() == 0:
        return math.nan, math.nan
    positive = scale[scale > 0]
    return positive.min().item() if positive.numel() else math.nan, scale.max().item()


def _least(choose: Callable[..., float], a: float, b: float) -> float:
    """Return choose(a, b), min or max, ignoring NaN."""
    return b if math.isnan(a) else a if math.isnan(b) else choose(a, b)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, the shorter vector padded with zeros: rows of sequences may differ in length."""
    length = max(len(a), len(b))
    return torch.nn.functional.pad(a, (0, length - len(a))) + torch.nn.functional.pad(b, (0, length - len(b)))


def _row_quantiles(power: Tensor | None, error: Tensor) -> dict[str, float]:
    """Return row_sqnr_db_* from the power and error of each row.

    The transform of +rht keeps a row's power, so x's own power can be used.
    """
    if power is None:
        return dict.fromkeys(("row_sqnr_db_median", "row_sqnr_db_p5"), math.nan)
    ratio = 10 * torch.log10(power / error)
    ratio = ratio[(power > 0) & ~ratio.isnan()].sort().values
    place = {"median": 0.5, "p5": 0.05}
    last = ratio.numel() - 1
    return {f"row_sqnr_db_{n}": ratio[int(q * last)].item() if last >= 0 else math.nan for n, q in place.items()}


def _by_row_squared(x: Tensor) -> Tensor:
    """Return float64 [rows]: the sum of squares of each row."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()


def _count_by_row(x: Tensor) -> Tensor:
    """Return float64 [rows]: the number of true elements in each row."""
    return x.sum(dim=1, dtype=torch.int32).double()


def _magnitude(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _by_tile(x: Tensor) -> Tensor:
    """Reshape [rows, cols] to [tiles down, 128, tiles across, 128], padded with zeros."""
    rows, cols = x.shape
    down, across = _tiles(rows), _tiles(cols)
    return torch.nn.functional.pad(x.double(), (0, across * TILE - cols, 0, down * TILE - rows)).view(
        down, TILE, across, TILE
    )


def _by_row(error2: Tensor) -> Tensor:
    rows, cols = error2.shape
    across = _tiles(cols)
    return torch.nn.functional.pad(error2, (0, across * TILE - cols)).view(rows, across, TILE).sum(dim=2)


def is_below(axis: int, direction: str) -> bool:
    """Whether parts that follow each other along an axis of X have operand rows of their own in this direction, in
    which an operand has the rows of X or of X.T; else they are parts of the same rows."""
    return (axis == 0) == (direction != "columnwise")
