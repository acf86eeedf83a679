"""The gaps that the formats' errors on Gaussian numbers would have predicted, as a second opinion beside a ladder's.

error   of a recipe: the mean over the three products of its linears, of the sum over both operands, of the relative
        error power sum (x - Qx)^2 / sum x^2 on independent N(0, 1) draws
gap     k error, where k is the least-squares factor of the other arms at the largest size
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey, parse
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import encode
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.pairs import GEMMS

SHAPE = (512, 512)


def gaussian_error(recipe: Mapping[str, Any] | None) -> float | None:
    """The error of a recipe in the form of a run's config, by its section `linear` alone; None for another recipe."""
    texts = (recipe or {}).get("linear")
    if not isinstance(texts, Mapping):
        return None
    try:
        quantizers = {tensor: HybridQuantizer.parse(text) for tensor, text in texts.items()}
        products = [sum(_error(quantizers[tensor], way) for tensor, way in operands) for operands in GEMMS.values()]
    except (UserError, KeyError):  # of another version of hqsweep
        return None
    return sum(products) / len(products)


def _error(quantizer: HybridQuantizer, direction: str) -> float:
    format = getattr(quantizer, direction)
    first = quantizer.rowwise if direction == "columnwise" and quantizer.columnwise_source != "original" else None
    return _power(str(format).replace("fp8_delayed", "fp8_current"), first and str(first))


@cache
def _power(text: str, first: str | None) -> float:
    """The relative error power of a format. first: the format that it is made from, by decoding its operand."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    start = x if first is None else _quantized(x, parse(first)).t().contiguous()
    values = _quantized(start, parse(text))
    values = values if first is None else values.t()
    return ((x - values).square().sum() / x.square().sum()).item()


def _quantized(x: torch.Tensor, format: Format) -> torch.Tensor:
    if format.high_precision:
        return x.to(format.dtype).float()
    key = RngKey(seed=0, slot="gaussian", step=0) if format.stochastic else None
    plain = parse(str(format).replace("+rht", "")) if format.rht else format  # which leaves N(0, 1) as it is
    return dequantize(encode(x, plain, key=key), plain, tuple(x.shape))


def expected_gaps(gaps: Mapping[str, float], errors: Mapping[str, float | None]) -> dict[str, float]:
    """Arm -> the gap that its error predicts from the gaps of all other arms; NaN where no other arm has both."""
    known = {arm: (gap, error) for arm, gap in gaps.items() if (error := errors.get(arm)) is not None}
    expected = dict.fromkeys(gaps, math.nan)
    for arm, (_, error) in known.items():
        others = [pair for other, pair in known.items() if other != arm]
        if square := sum(other**2 for _, other in others):
            expected[arm] = error * sum(gap * other for gap, other in others) / square
    return expected
