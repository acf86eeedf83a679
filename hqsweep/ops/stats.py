"""Error statistics of one quantized tensor, or of one GEMM's output, as plain floats.

sqnr_db        10 log10(sum x^2 / sum (x - Qx)^2)
rel_l2         sqrt(sum (x - Qx)^2 / sum x^2)
cosine         <x, Qx> / (|x| |Qx|)
underflow_pct  share of non-zero x with Qx = 0, in percent
saturation_pct share of x more than 2^-8 beyond the largest value its block can hold, in percent
scale_min/max  smallest non-zero and largest decode scale of a block, global factor included
"""

import math

from torch import Tensor

from hqsweep.formats import Buffers, Format
from hqsweep.formats.base import expand_tiles

SATURATION_MARGIN = 1 + 2.0**-8
"""Rounding of scales puts a block's own amax up to an ulp above the top code; that is not counted as saturation."""


def output_error(expected: Tensor, actual: Tensor) -> dict[str, float]:
    """sqnr_db, rel_l2, cosine and amax (of expected) for two tensors of one shape, summed in float64."""
    x, q = expected.double().flatten(), actual.double().flatten()
    power, error, norm = (x @ x).item(), (x - q).square().sum().item(), math.sqrt((q @ q).item())
    return {
        "sqnr_db": _decibel(power, error),
        "rel_l2": math.sqrt(error / power) if power else math.nan,
        "cosine": (x @ q).item() / (math.sqrt(power) * norm) if power and norm else math.nan,
        "amax": expected.abs().max().item() if expected.numel() else 0.0,
    }


def tensor_error(x: Tensor, format: Format, buffers: Buffers) -> dict[str, float]:
    """All statistics of buffers = encode(x), with x [rows, cols] in the operand's own orientation."""
    shape = tuple(x.shape)
    basis, decoded = format.basis(x), format.decode(buffers, shape)
    nonzero = basis != 0
    lost = (nonzero & (decoded == 0)).sum().item()
    return output_error(basis, decoded) | {
        "underflow_pct": 100.0 * lost / max(nonzero.sum().item(), 1),
        **_scale_statistics(basis, format, buffers),
    }


def from_sums(sums: Tensor, elements: int, format: Format, buffers: Buffers | None) -> dict[str, float]:
    """The same from what kernels gather while they quantize `elements` of them, added in float64.

    sums: float32 [tiles, 8] over tiles of 128 x 128: x^2, error^2, q^2, amax, counts of non-zero, lost and saturated
    elements. buffers: for the scales; None (exact output) leaves these out as NaN.
    """
    x2, error2, q2, _, nonzero, lost, saturated, _ = sums.double().sum(dim=0).tolist()
    return {
        "sqnr_db": _decibel(x2, error2),
        "rel_l2": math.sqrt(error2 / x2) if x2 else math.nan,
        "cosine": (x2 + q2 - error2) / (2 * math.sqrt(x2 * q2)) if x2 and q2 else math.nan,
        "amax": sums[:, 3].max().item() if sums.numel() else 0.0,
        "underflow_pct": 100.0 * lost / max(nonzero, 1),
        "saturation_pct": 100.0 * saturated / max(elements, 1),
        **_scale_range(None if buffers is None else format.value_scales(buffers)),
    }


def _scale_statistics(basis: Tensor, format: Format, buffers: Buffers) -> dict[str, float]:
    scale = format.value_scales(buffers)
    if scale is None:
        return {"saturation_pct": 0.0} | _scale_range(None)
    limit = expand_tiles(scale, tuple(basis.shape), *format.tile) * (format.element.max * SATURATION_MARGIN)
    return {"saturation_pct": 100.0 * (basis.abs() > limit).double().mean().item()} | _scale_range(scale)


def _scale_range(scale: Tensor | None) -> dict[str, float]:
    if scale is None or scale.numel() == 0:
        return {"scale_min": math.nan, "scale_max": math.nan}
    positive = scale[scale > 0]
    return {
        "scale_min": positive.min().item() if positive.numel() else math.nan,
        "scale_max": scale.max().item(),
    }


def _decibel(power: float, error: float) -> float:
    if error == 0:
        return math.inf
    return 10 * math.log10(power / error) if power else math.nan


def finite_or_none(row: dict[str, float]) -> dict[str, float | None]:
    """NaN (a statistic that does not exist) as None, for JSON rows."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
