"""nvfp4+tensor against numpy and ml_dtypes: the scale by its definition in float64, codes by the library's cast."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import DISTRIBUTIONS, draw
from hqsweep.ops.quantize.quantize import Target, quantize

SHAPE = (48, 80)


def scale_of(x: np.ndarray, *, pow2: bool = False) -> np.float32:
    """fl(6 / amax), rounded to float32 once from float64, which holds the quotient closely enough."""
    magnitudes = np.abs(np.where(np.isnan(x), 0, x))
    amax = magnitudes.max()
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(6.0 / np.float64(amax))
    scale = np.minimum(scale, np.finfo(np.float32).max)
    return np.exp2(np.floor(np.log2(np.float64(scale)))).astype(np.float32) if pow2 else scale


def cast(scaled: np.ndarray) -> np.ndarray:
    """float32 -> E2M1 codes by ml_dtypes, whose cast is RNE; clipped, because it knows no saturation."""
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(scaled), 7, codes).astype(np.uint8)


def values(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("option", ["", "+pow2"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_codes_and_values_are_ml_dtypes_under_one_scale(distribution, option, backend):
    format, x = parse(f"nvfp4+tensor{option}"), draw(distribution, *SHAPE, dtype=torch.float32)
    operands = quantize(x, format, format, backend=backend)
    for buffers, matrix in ((operands.rowwise, x), (operands.columnwise, x.t())):
        wide = matrix.contiguous().numpy()
        scale = scale_of(wide, pow2=bool(option))
        codes = cast((wide * scale).astype(np.float32))
        inverse = (np.float32(1) / scale).astype(np.float32)
        np.testing.assert_array_equal(format.codes(buffers).numpy(), codes)
        np.testing.assert_array_equal(buffers["s"].numpy(), [[inverse]])
        decoded = format.decode(buffers, tuple(matrix.shape)).numpy()
        np.testing.assert_array_equal(decoded, values(codes) * inverse)


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("signed", [True, False])
def test_the_transform_is_that_of_nvfp4(signed, backend):
    """NVFP4's basis of a matrix that fills one block of 16 is what is quantized, under the amax of the whole."""
    text = "+rht" if signed else "+rht+nosign"
    x = draw("heavy", *SHAPE)
    basis = parse(f"nvfp4{text}").basis(x)
    assert torch.equal(parse(f"nvfp4+tensor{text}").basis(x), basis)
    got = quantize(x, parse(f"nvfp4+tensor{text}"), backend=backend).rowwise
    plain = quantize(basis, parse("nvfp4+tensor"), backend="reference").rowwise
    assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_stochastic_rounding_is_unbiased(backend):
    format, x = parse("nvfp4+tensor+sr"), torch.linspace(-3, 3, 1024).view(8, 128)
    total, draws = torch.zeros(8, 128, dtype=torch.float64), 800
    for step in range(draws):
        buffers = quantize(x, Target(format, key=RngKey(seed=1, slot="t", step=step)), backend=backend).rowwise
        total += format.decode(buffers, (8, 128)).double()
    scaled = (x * 2).abs()
    step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0)) / 2
    bias = total / draws - x.double()
    assert (bias.abs() <= step / 256 + 4.5 * step / 2 / draws**0.5).all()
    assert len(torch.unique(bias)) > 100


def test_the_text_takes_the_second_word_anywhere():
    assert str(parse("nvfp4+sr+tensor")) == "nvfp4+tensor+sr" == str(parse("nvfp4+tensor+sr"))
    assert parse("nvfp4+tensor") != parse("nvfp4") and parse("nvfp4+tensor").bits_per_element(128, 128) < 4.01


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp4+tensr", r"unknown option '\+tensr' .did you mean 'tensor'.*nvfp4 takes \+2d.*\+tensor$"),
        ("nvfp4+tensor+2d", r"unknown option '\+2d'; nvfp4\+tensor takes \+rht, .*\+nosign, \+sr, \+pow2"),
        ("mxfp4+tensor", r"unknown option '\+tensor'.*; mxfp4 takes"),
        ("nvfp4+tensor+tensor", r"unknown option '\+tensor'.*; nvfp4\+tensor takes"),
        ("nvfp4+tensor+nosign", r"nosign describes the transform of \+rht"),
    ],
)
def test_what_it_does_not_take_is_said(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)
