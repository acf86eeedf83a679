"""Error statistics against numbers worked by hand and against closed forms for Gaussian data."""

import math

import pytest
import torch
from cases import FEW_KERNEL_PAIRS, KERNEL_PAIRS, crossed
from support.ops.calls import quantize
from support.ops.statistics import assert_same_row

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.stats import finite_or_none, gather, gather_by_row, output_error


def test_output_error_by_hand():
    error = output_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert error["sqnr_db"] == pytest.approx(10 * math.log10(25))
    assert error["rel_l2"] == pytest.approx(0.2)
    assert error["cosine"] == pytest.approx(21 / (5 * math.sqrt(18)))
    assert error["amax"] == 4.0


def test_exact_values_have_no_error_and_zeros_no_statistic():
    x = torch.ones(4, 32)
    assert gather(x, parse("mxfp8"), parse("mxfp8").encode(x)).row()["sqnr_db"] == math.inf
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
    assert gather(x, format, format.encode(x)).row()["sqnr_db"] == pytest.approx(decibel, abs=0.1)


@pytest.mark.feature("T32")
def test_underflow_and_saturation_are_counted():
    x = torch.full((1, 32), 1e-6)
    x[0, 0] = 448.0
    row = gather(x, parse("fp8_current"), parse("fp8_current").encode(x)).row()
    assert row["underflow_pct"] == pytest.approx(100 * 31 / 32)
    assert row["saturation_pct"] == 0
    clipped = parse("fp8_current").encode(x, {"s": torch.tensor([[200.0]])})
    assert gather(x, parse("fp8_current"), clipped).row()["saturation_pct"] == pytest.approx(100 / 32)


def test_the_parts_of_an_error_by_hand():
    """In blocks of scale 1: 0.2 and -0.2 are lost; 6, 2.4 and -2.4 become 6, 2 and -2, so that b = -1.92 / 47.52."""
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([6.0, 0.2, -0.2, 2.4, -2.4])
    row = gather(x, parse("mxfp4"), parse("mxfp4").encode(x)).row()
    others, error, lost = 36 + 2 * 2.4**2, 2 * 0.4**2, 2 * 0.2**2
    bias = -2 * 2.4 * 0.4 / others
    assert row["scale_bias"] == pytest.approx(bias, rel=1e-6)
    parts = [lost, bias**2 * others, error - bias**2 * others]
    measured = [row[f"{name}_error_pct"] for name in ("dead_zone", "scale", "grid")]
    assert measured == pytest.approx([100 * part / (lost + error) for part in parts], rel=1e-5)
    exact = gather(torch.ones(1, 32), parse("mxfp4"), parse("mxfp4").encode(torch.ones(1, 32))).row()
    assert exact["scale_bias"] == 0 and math.isnan(exact["grid_error_pct"])


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "nvfp4+rht", "mxfp8", "fp8_current", "nvfp4+sr"])
def test_the_parts_of_an_error_are_orthogonal(text):
    """Against the elements themselves in float64: noise is Qx - (1 + b) x, orthogonal to x, where Qx is not 0."""
    format, x = parse(text), draw("heavy", 96, 160)
    key = RngKey(seed=1, slot="t", step=2)
    buffers = format.encode(x, key=key)
    basis, decoded = format.basis(x).double(), format.decode(buffers, tuple(x.shape)).double()
    row, other = gather(x, format, buffers).row(), (decoded != 0) | (basis == 0)
    bias = (basis * (decoded - basis))[other].sum() / basis[other].square().sum()
    noise = (decoded - (1 + bias) * basis)[other]
    assert row["scale_bias"] == pytest.approx(bias.item(), abs=1e-12) and abs((noise @ basis[other]).item()) < 1e-6
    parts = {"dead_zone": basis[~other].square().sum(), "scale": bias**2 * basis[other].square().sum()}
    parts["grid"] = noise.square().sum()
    whole = (decoded - basis).square().sum()
    for name, part in parts.items():
        assert row[f"{name}_error_pct"] == pytest.approx((100 * part / whole).item(), rel=1e-6, abs=1e-9)
    assert sum(row[f"{name}_error_pct"] for name in parts) == pytest.approx(100)


def test_scales_include_the_global_factor():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 12.0, 3.0
    row = gather(x, parse("nvfp4"), parse("nvfp4").encode(x)).row()
    assert (row["scale_min"], row["scale_max"]) == (0.5, 2.0)


def test_rows_are_summarised_by_their_median_and_worst():
    """Row r is ones but for 1 + r / 4096, which rounds to 1; the last row has no error."""
    x = torch.ones(21, 32)
    x[:20, 0] = 1 + torch.arange(1, 21) / 2.0**12  # rounds to 1 in E4M3
    row = gather(x, parse("mxfp8"), parse("mxfp8").encode(x)).row()
    power = x.double().square().sum(dim=1)
    sqnr = 10 * torch.log10(power[:20] / (torch.arange(1, 21).double() / 2.0**12).square())
    assert row["row_sqnr_db_median"] == pytest.approx(sqnr[9].item())  # the 11th of 21, the last being infinite
    assert row["row_sqnr_db_p5"] == pytest.approx(sqnr[18].item())  # one row of 21 is worse
    zeros = gather(torch.zeros(4, 32), parse("mxfp8"), parse("mxfp8").encode(torch.zeros(4, 32))).row()
    assert math.isnan(zeros["row_sqnr_db_median"]) and zeros["amax"] == 0


@pytest.mark.parametrize("special", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("text", ["bf16", "fp16", "fp32", "mxfp8", "fp8_current", "nvfp4+rht"])
def test_sums_by_row_are_those_by_tile(text, dtype, special):
    format, x = parse(text), draw("heavy", 96, 160).to(dtype)
    x[3], x[4, :5], x[5, 0] = 0.0, 2.0**-24, 1.0 if special is None else special
    for matrix in (x, x.t(), x[:0]):
        buffers = format.encode(matrix)
        got, wanted = (f(matrix, format, buffers).read() for f in (gather_by_row, gather))
        assert torch.equal(got.totals[3:7], wanted.totals[3:7]) and got.elements == wanted.elements
        for name in ("totals", "row_power", "row_error"):
            pair = getattr(got, name), getattr(wanted, name)
            torch.testing.assert_close(*pair, rtol=1e-6, atol=0, equal_nan=True)
        assert str(got.scales) == str(wanted.scales)


def test_squares_beyond_float32_have_no_ratios():
    x, format = draw("huge", 64, 64), parse("mxfp8")
    kernel, reference = (quantize(x, format, statistics=True, backend=b) for b in ("kernel", "reference"))
    got, wanted = kernel.rowwise_statistics.row(), reference.rowwise_statistics.row()
    assert math.isnan(got["sqnr_db"]) and wanted["sqnr_db"] > 20
    assert (got["amax"], got["saturation_pct"]) == (wanted["amax"], wanted["saturation_pct"])


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.feature("T32")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("texts", "output", "source"),
    crossed(KERNEL_PAIRS, ["codes", "exact"], ["original", "rowwise_dequantized"], whole=FEW_KERNEL_PAIRS),
    ids=lambda value: value if isinstance(value, str) else "|".join(value),
)
def test_kernels_gather_what_the_reference_does(texts, output, source, device):
    """Tile by tile: sums up to float32, the largest magnitude and the counts exactly."""
    x, key = draw("heavy", 208, 304).to(device), RngKey(seed=1, slot="t", step=2)
    options = {"columnwise_source": source, "rowwise_key": key, "columnwise_key": key, "statistics": True}
    options |= {"rowwise_output": output, "columnwise_output": output}
    ours, theirs = (quantize(x, *map(parse, texts), backend=b, **options) for b in ("kernel", "reference"))
    for direction in ("rowwise", "columnwise"):
        got, wanted = (getattr(result, f"{direction}_statistics") for result in (ours, theirs))
        sums = got.sums.double()
        assert torch.equal(sums[:, 3:7], wanted.sums[:, 3:7])
        for summed in (slice(3), slice(7, 8)):
            torch.testing.assert_close(sums[:, summed], wanted.sums[:, summed], rtol=1e-5, atol=0)
        torch.testing.assert_close(got.row_errors.double(), wanted.row_errors, rtol=1e-5, atol=0)
        told, expected = got.row(), wanted.row()
        assert_same_row(told, expected, abs=10 * math.log10(1 + 1e-5))
        assert math.isnan(told["scale_max"]) == (output == "exact")
