"""The transform of +rht in all sizes against a float64 matrix, stochastic rounding of mxfp4 by hand, and products."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as hadamard_matrix

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.hadamard import SIGNS, hadamard
from hqsweep.formats.inputs import draw
from hqsweep.formats.random import random_bytes
from hqsweep.nn import Linear, quantization
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe.sections import LinearQuantizers

SIZES = {16: "rht", 32: "rht32", 64: "rht64", 128: "rht128"}
NAMES = ("mxfp4", "nvfp4", "nvfp4+tensor")
GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KEY = RngKey(seed=3, slot="w", step=7)


def matrix(size: int, signed: bool) -> torch.Tensor:
    """R with y = x @ R, in float64: scipy's Hadamard matrix behind the signs."""
    d = torch.tensor(SIGNS[:size] if signed else [1] * size, dtype=torch.float64)
    return d[:, None] * torch.from_numpy(hadamard_matrix(size)).double() / size**0.5


def applied(x: torch.Tensor, size: int, signed: bool = True) -> torch.Tensor:
    return (x.double().view(-1, size) @ matrix(size, signed)).view(x.shape)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_butterflies_are_the_matrix(size, signed):
    x = draw("normal", 24, 256, dtype=torch.float32)
    torch.testing.assert_close(
        hadamard(x, size=size, signed=signed).double(), applied(x, size, signed), atol=2e-6, rtol=0
    )


def test_the_signs_are_fixed_and_of_both_kinds():
    assert SIGNS[:16] == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    assert len(SIGNS) == 128 and 48 < sum(sign < 0 for sign in SIGNS) < 80
    assert all(-16 < sum(SIGNS[i : i + 16]) < 16 for i in range(0, 128, 16))


@pytest.mark.parametrize("size", [16, 64])  # whose factor is a power of two: sums of small whole numbers are exact
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", ["", "+nosign"])
def test_a_format_encodes_the_transformed_matrix(name, size, sign):
    x = torch.randint(-3, 4, (32, 128), generator=torch.Generator().manual_seed(size)).float()
    y = applied(x, size, not sign)
    assert torch.equal(y.float().bfloat16().double(), y)
    got, expected = parse(f"{name}+{SIZES[size]}{sign}").encode(x), parse(name).encode(y.bfloat16())
    assert all(torch.equal(got[buffer], expected[buffer]) for buffer in expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_the_contracted_axis_has_whole_groups(name, size):
    format = parse(f"{name}+{SIZES[size]}")
    assert format.column_multiple == size and str(format) == f"{name}+{SIZES[size]}"
    with pytest.raises(UserError, match=f"the contracted axis has 8 elements; it takes a multiple of {size}"):
        format.encode(torch.zeros(4, 8))


def test_stochastic_rounding_of_mxfp4_goes_up_by_the_byte():
    """Between neighbours of the grid: up where byte / 256 of the step reaches the upper one."""
    x = draw("heavy", 48, 64, dtype=torch.float32)
    format = parse("mxfp4+sr")
    got, nearest = format.encode(x, key=KEY), parse("mxfp4").encode(x)
    assert torch.equal(got["s"], nearest["s"])
    scaled = (x.double() / torch.exp2(nearest["s"].double() - 127).repeat_interleave(32, 1)).numpy()
    low = np.clip(np.searchsorted(GRID, np.abs(scaled), side="right") - 1, 0, 6)
    step, byte = np.diff(GRID)[low], random_bytes(KEY, 48, 64).numpy()
    reach = np.abs(scaled).astype(np.float32) + byte / np.float32(256) * step.astype(np.float32)
    up = reach >= GRID[low + 1]
    values = format.element.decode(format.codes(got)).numpy()
    certain = np.abs(reach - GRID[low + 1]) > 1e-5
    expected = np.copysign(np.where(up, GRID[low + 1], GRID[low]), scaled)
    assert certain.mean() > 0.99 and np.array_equal(values[certain], expected[certain])


def test_stochastic_rounding_of_mxfp4_has_no_bias():
    x = torch.linspace(-5.9, 5.9, 64).repeat(4000, 1)
    x[:, ::32] = 6.0
    format = parse("mxfp4+sr")
    mean = format.decode(format.encode(x, key=KEY), tuple(x.shape)).double().mean(0)
    assert (mean - x[0].double()).abs().max() < 0.06
    with pytest.raises(ValueError, match=r"mxfp4\+sr: encode needs an RngKey"):
        format.encode(x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_transforms_of_all_products_cancel(name, size):
    """Products of a transformed with another operand have an error of about 1.4."""
    text = f"{name}+{SIZES[size]}"
    x, dy = (draw("normal", 128, 128, seed).float() for seed in (1, 2))
    results = []
    for section in (f"{text}|{text}", "fp32"):
        layer = Linear(128, 128, bias=False, name="m", recipe=f"format:{section}", dtype=torch.float32)
        with torch.no_grad():
            layer.weight.copy_(draw("normal", 128, 128, 3).float())
        leaf = x.clone().requires_grad_()
        with quantization(seed=1, step=1):
            y = layer(leaf)
            y.backward(dy)
        results.append([t.detach().double() for t in (y, leaf.grad, layer.weight.grad)])
    for transformed, exact in zip(*results, strict=True):
        assert (transformed - exact).norm() / exact.norm() < 0.25


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("mxfp4+rht32|mxfp4", r"\(of 32 with signs, of 16 with signs\), so they do not cancel"),
        ("mxfp4+rht+nosign|mxfp4", r"\(of 16 with signs, of 16 without signs\), so they do not cancel"),
        ("mxfp4", "must be on both operands or on neither"),
    ],
)
def test_other_transforms_on_one_side_are_refused(weight, message):
    section = {"input": "mxfp4+rht|mxfp4", "weight": weight, "grad_output": "mxfp4"}
    if "of 32" in message:
        section["input"], section["weight"] = weight, "mxfp4+rht|mxfp4"
    with pytest.raises(UserError, match=rf"fprop: input rowwise mxfp4\+rht.* cannot meet weight rowwise .*{message}"):
        Linear(32, 32, name="m", recipe=LinearQuantizers.parse(section, "m"))


def test_decoded_rows_under_a_transform_are_no_source():
    assert str(HybridQuantizer.parse("mxfp4+rht|mxfp4+rht")) == "mxfp4+rht|mxfp4+rht"
    with pytest.raises(UserError, match="no columnwise operand can be made from them; take source original"):
        HybridQuantizer.parse("mxfp4+rht|mxfp4@rowwise_dequantized")
