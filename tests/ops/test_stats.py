"""Error statistics against numbers worked by hand and against closed forms for Gaussian data."""

import math

import pytest
import torch

from hqsweep.formats import parse
from hqsweep.ops.stats import finite_or_none, output_error, tensor_error


def test_output_error_by_hand():
    error = output_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert error["sqnr_db"] == pytest.approx(10 * math.log10(25))
    assert error["rel_l2"] == pytest.approx(0.2)
    assert error["cosine"] == pytest.approx(21 / (5 * math.sqrt(18)))
    assert error["amax"] == 4.0


def test_exact_values_have_no_error_and_zeros_no_statistic():
    x = torch.ones(4, 32)
    assert tensor_error(x, parse("mxfp8"), parse("mxfp8").encode(x))["sqnr_db"] == math.inf
    nothing = output_error(torch.zeros(4), torch.ones(4))
    assert math.isnan(nothing["cosine"]) and finite_or_none(nothing)["cosine"] is None


# dB on N(0, 1): E4M3 and E5M2 follow 6.02 m + 13.46; NVFP4 rows are Quartet II's MSE table (arXiv 2601.22813, table 1:
# 9.0e-3 RTN 1x16, 12.4e-3 16x16, 7.6e-3 4over6) within 0.1 dB.
@pytest.mark.parametrize(
    ("text", "decibel"),
    [
        ("bf16", 55.60), ("mxfp8", 31.52), ("mxfp8+e5m2", 25.50), ("fp8_current", 31.52),
        ("nvfp4", -10 * math.log10(9.0e-3)), ("nvfp4+2d", -10 * math.log10(12.4e-3)),
        ("nvfp4+4over6+mse", -10 * math.log10(7.6e-3)),
    ],
)  # fmt: skip
def test_sqnr_of_gaussian_data(text, decibel):
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    format = parse(text)
    assert tensor_error(x, format, format.encode(x))["sqnr_db"] == pytest.approx(decibel, abs=0.1)


def test_underflow_and_saturation_are_counted():
    x = torch.full((1, 32), 1e-6)
    x[0, 0] = 448.0
    row = tensor_error(x, parse("fp8_current"), parse("fp8_current").encode(x))
    assert row["underflow_pct"] == pytest.approx(100 * 31 / 32)
    assert row["saturation_pct"] == 0
    clipped = parse("fp8_current").encode(x, {"s": torch.tensor([[200.0]])})
    assert tensor_error(x, parse("fp8_current"), clipped)["saturation_pct"] == pytest.approx(100 / 32)


def test_scales_include_the_global_factor():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 12.0, 3.0
    row = tensor_error(x, parse("nvfp4"), parse("nvfp4").encode(x))
    assert (row["scale_min"], row["scale_max"]) == (0.5, 2.0)
