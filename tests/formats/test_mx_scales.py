"""MX scale rounding (up, +floor, +even, +ceil) against torchao's to_mx, whose four modes these are, and by hand.

tests/golden/torchao_mx.npz has one block a row, torchao_mx_ceil.npz the same blocks under CEIL. torchao differs from
the rules of formats/mx.py in three known ways, each tested as such: a NaN makes its whole block NaN; scale byte 0 is
applied as 2^-126 (RCEIL: as 1) instead of 2^-127; and RCEIL takes a float32 log2, which rounds quotients just above a
power of two down to it. All else is equal.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import ELEMENTS_OF_MX

from hqsweep.formats import parse
from hqsweep.formats.elements import ELEMENTS, e8m0_floor

FILES = [np.load(Path(__file__).parents[1] / "golden" / name) for name in ("torchao_mx.npz", "torchao_mx_ceil.npz")]
GOLDEN = {key: file[key] for file in FILES for key in file.files}
CASES = sorted(key.removesuffix("/rowwise_scale") for key in GOLDEN if key.endswith("/rowwise_scale"))


def load(case: str):
    """Format, float32 blocks [n, 32], and torchao's scales [n, 1] and codes [n, 32] or packed."""
    dtype, text = case.split("/")
    x = torch.from_numpy(GOLDEN[f"{dtype}/input"])
    x = x.view(torch.bfloat16).float() if dtype == "bf16" else x
    return parse(text), x, *(torch.from_numpy(GOLDEN[f"{case}/rowwise_{name}"]) for name in ("scale", "data"))


def disagreements(format, x, scale):
    """Masks over the blocks: with a NaN, with scale byte 0, and where log2 of amax / max is no longer above a power."""
    nan = x.isnan().any(1)
    quotient = x.abs().amax(1).double() / format.element.max
    below = torch.exp2(scale[:, 0].double() - 127)
    inexact = (quotient > below) & (quotient < below * (1 + 2.0**-20)) & (format.scale_rounding == "up")
    return nan, (scale[:, 0] == 0) & ~nan, inexact & ~nan


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_torchao(case):
    format, x, scale, data = load(case)
    got = format.encode(x)
    nan, lowest, inexact = disagreements(format, x, scale)
    same = ~(nan | inexact)
    assert same.sum() > 95
    assert torch.equal(got["s"][same], scale[same])
    assert torch.equal(got["q"][same & ~lowest], data[same & ~lowest])


@pytest.mark.parametrize("case", CASES)
def test_torchao_applies_the_lowest_scale_as_another_power(case):
    format, x, scale, data = load(case)
    _, lowest, _ = disagreements(format, x, scale)
    assert lowest.sum() >= 7
    theirs = 1.0 if format.scale_rounding == "up" else 2.0**126
    for factor, codes in ((theirs, data), (2.0**127, format.encode(x)["q"])):
        expected = format.element.encode(x[lowest] * factor)
        expected = expected[:, 0::2] | expected[:, 1::2] << 4 if format.packed else expected
        assert torch.equal(codes[lowest], expected)


@pytest.mark.parametrize("case", [c for c in CASES if parse(c.split("/")[1]).scale_rounding == "up"])
def test_torchaos_log2_rounds_up_scales_down(case):
    format, x, scale, _ = load(case)
    _, _, inexact = disagreements(format, x, scale)
    assert inexact.any() == case.startswith("fp32")  # a bfloat16 amax is never that near
    assert torch.equal(format.encode(x)["s"][inexact], scale[inexact] + 1)


@pytest.mark.parametrize("case", CASES)
def test_nan_does_not_count_in_amax_but_is_torchaos_amax(case):
    format, x, scale, _ = load(case)
    rows = x.isnan().any(1)
    assert rows.sum() == 1 and (scale[rows] == 255).all()
    got, without = format.encode(x[rows]), format.encode(x[rows].nan_to_num(0.0))
    assert torch.equal(got["s"], without["s"]) and got["s"].item() != 255
    codes, there = format.codes(got), x[rows].isnan()
    assert (codes[there] == format.element.nan_code).all()
    assert torch.equal(codes[~there], format.codes(without)[~there])


def block(*values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


@pytest.mark.parametrize(
    ("text", "values", "byte", "decoded"),
    [
        # mxfp4: max 6 = 1.5 * 2^2, emax 2. amax 7: 7/6 > 1 rounds up to 2, 7/2 = 3.5 ties to 4 (even code), so 8.
        ("mxfp4", (7.0, 3.0), 128, (8.0, 3.0)),
        # floor(log2 7) = 2, scale 2^0: 7 saturates to 6.
        ("mxfp4+floor", (7.0, 3.0), 127, (6.0, 3.0)),
        # 7 = 1.11b * 2^2: to one mantissa bit the tie goes up, 1.0b * 2^3, scale 2^1.
        ("mxfp4+even", (7.0, 3.0), 128, (8.0, 3.0)),
        # 6.75 = 1.1011b * 2^2 goes down to 1.1b * 2^2, scale 2^0.
        ("mxfp4+even", (6.75, 3.0), 127, (6.0, 3.0)),
        # mxfp8 E4M3: max 1.11b * 2^8, emax 8. amax 480 = 1.111b * 2^8 saturates at 448 with scale 2^0 ...
        ("mxfp8+floor", (480.0, 1.0), 127, (448.0, 1.0)),
        # ... and to three bits it is itself, so +even saturates too, up to 1.1111b * 2^8 = 496, which ties up to 2^9.
        ("mxfp8+even", (480.0, 1.0), 127, (448.0, 1.0)),
        ("mxfp8+even", (496.0, 1.0), 128, (512.0, 1.0)),
        ("mxfp8", (480.0, 1.0), 128, (480.0, 1.0)),
        # E5M2: emax 15. 2^15 * 1.111b = 61440 ties up from two bits; 2^16 / 2^15 = 2.
        ("mxfp8+e5m2+even", (61440.0,), 128, (65536.0,)),
        ("mxfp8+e5m2+floor", (61440.0,), 127, (57344.0,)),
        # E2M3: max 7.5 = 1.111b * 2^2: 7.75 = 1.1111b * 2^2 ties up to 2^3, 7.75 / 2 = 3.875 ties to 4.
        ("mxfp6_e2m3+even", (7.75,), 128, (8.0,)),
        ("mxfp6_e2m3+floor", (7.75,), 127, (7.5,)),
        # E3M2: emax 4. 30 = 1.111b * 2^4.
        ("mxfp6_e3m2+even", (30.0,), 128, (32.0,)),
        ("mxfp6_e3m2+floor", (30.0,), 127, (28.0,)),
        ("mxfp4+ceil", (6.0,), 128, (6.0,)),  # 6 lies above 4: the scale is 8 / 4 = 2, where up has 6 / 6 = 1
        ("mxfp4+ceil", (4.0, 1.0), 127, (4.0, 1.0)),
        ("mxfp8+ceil", (480.0,), 128, (480.0,)),
    ],
)
def test_block_by_hand(text, values, byte, decoded):
    format, x = parse(text), block(*values)
    got = format.encode(x)
    assert got["s"].tolist() == [[byte]]
    assert format.decode(got, (1, 32))[0, : len(decoded)].tolist() == list(decoded)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("name", ELEMENTS)
def test_ends_of_the_range(name, even):
    element = ELEMENTS[name]
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0 ** (element.max_exponent - 127), 3.4e38, torch.inf, torch.nan])
    top = 254 - element.max_exponent + even  # 3.4e38 is 1.99...b * 2^127
    expected = [0, 0, max(0, 1 - element.max_exponent), 0, top, 255 - element.max_exponent, 255]
    assert e8m0_floor(amax, element, "even" if even else "floor").tolist() == expected


@pytest.mark.parametrize("text", ELEMENTS_OF_MX)
def test_floor_is_one_below_up_where_the_top_saturates_and_even_between(text):
    amax = torch.from_numpy(np.random.default_rng(0).integers(20 << 23, 240 << 23, 20_000, np.int32)).view(
        torch.float32
    )
    x = amax[:, None] * torch.ones(1, 32)
    up, floor, even = (parse(text + option).encode(x)["s"].int() for option in ("", "+floor", "+even"))
    assert set((up - floor).unique().tolist()) == {0, 1}
    assert ((floor <= even) & (even <= up)).all() and (even != floor).any() and (even != up).any()
    mantissa = torch.frexp(amax)[0] * 2
    assert torch.equal(
        (up - floor)[:, 0] == 1, mantissa > parse(text).element.max / 2.0 ** parse(text).element.max_exponent
    )
