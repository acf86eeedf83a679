"""operand() is exact: over all codes and all scales of a format, the bfloat16 matrix times the factor is the value.

The true value is computed in float64, which holds code * power of two and E2M1 * E4M3 exactly. Outside the range that
the docstrings state, the matrix must be the value rounded once to bfloat16.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import ALL, EVERY_OPTION, HIGH

from hqsweep.formats import eden, parse
from hqsweep.formats.elements import ELEMENTS

LOW = [parse(text) for text in EVERY_OPTION if text not in HIGH]
MX = [str(f) for f in LOW if f.scaling == "mx"]
BLOCKS = [str(f) for f in LOW if f.scaling == "block" and f.fits_bf16 and not f.amax_epsilon]
NVFP4 = [str(f) for f in LOW if f.scaling == "nvfp4"]


def every_product(format, scales: torch.Tensor, block: int):
    """Buffers with one row (or one tile of rows) per scale and every code in each row, and the codes' shape."""
    codes = torch.arange(1 << format.element.bits, dtype=torch.uint8)
    codes = codes.repeat(-(-block // len(codes)))
    rows = len(scales) * format.tile[0]
    q = codes.repeat(rows, 1)
    if format.element.bits == 4:
        q = q[:, 0::2] | q[:, 1::2] << 4
    s = scales[:, None].repeat(1, len(codes) // block)
    true = format.element.decode(codes).double() * decoded(scales).repeat_interleave(format.tile[0])[:, None]
    return {"q": q, "s": s}, (rows, len(codes)), true


def decoded(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()


def rounded(true: torch.Tensor) -> np.ndarray:
    """float64 -> bfloat16 in one rounding; ml_dtypes goes through float32, so that step has to be exact."""
    single = true.numpy().astype(np.float32)
    finite = np.isfinite(single)
    assert (single[finite] == true.numpy()[finite]).all()
    return single.astype(ml_dtypes.bfloat16).view(np.uint16)


def check_power_of_two_scales(format, buffers, shape, true, scales):
    operand = format.operand(buffers, shape)
    assert operand.matrix.dtype == torch.bfloat16
    assert operand.factor is None and operand.divisor == 1
    low, high = format.element.exact_scale_range
    inside = ((decoded(scales) >= low) & (decoded(scales) <= high)).repeat_interleave(format.tile[0])
    assert inside.any() and not inside.all()
    torch.testing.assert_close(operand.matrix[inside].double(), true[inside], rtol=0, atol=0, equal_nan=True)
    numbers = ~true.isnan().numpy()
    np.testing.assert_array_equal(operand.matrix.view(torch.uint16).numpy()[numbers], rounded(true)[numbers])
    assert operand.matrix.isnan().numpy()[~numbers].all()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("text", MX)
def test_mx_over_all_codes_and_scales(text):
    format = parse(text)
    scales = torch.arange(255, dtype=torch.uint8)
    check_power_of_two_scales(format, *every_product(format, scales, 32), scales)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("text", BLOCKS)
def test_fp8_block_over_all_codes_and_power_of_two_scales(text):
    format = parse(text)
    scales = torch.exp2(torch.arange(-127, 128).double()).float()  # 1 / scale, and a scale is at most 2^127
    check_power_of_two_scales(format, *every_product(format, scales, 128), scales)


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_exact_range_cannot_be_wider(name):
    element = ELEMENTS[name]
    low, high = element.exact_scale_range
    values = element.values().double()
    values = values[values.isfinite()]

    def exact(scale: float) -> bool:
        return bool((values * scale == (values * scale).bfloat16().double()).all())

    assert exact(low) and exact(high)
    assert not exact(low / 2) and not exact(high * 2)


@pytest.mark.parametrize("text", [text for text in EVERY_OPTION if parse(text).name == "fp8_current"])
def test_fp8_current_over_all_codes(text):
    format = parse(text)
    codes = torch.arange(256, dtype=torch.uint8)[None]
    scale = torch.tensor([[0.37]])
    operand = format.operand({"q": codes, "s": scale}, (1, 256))
    assert operand.matrix.dtype == torch.bfloat16 and operand.divisor == 1
    torch.testing.assert_close(operand.matrix.float(), format.element.decode(codes), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(operand.factor, scale)


@pytest.mark.parametrize("text", [text for text in EVERY_OPTION if parse(text).name == "nvfp4+tensor"])
def test_nvfp4_tensor_over_all_codes(text):
    format = parse(text)
    codes, scale = torch.arange(16, dtype=torch.uint8)[None], torch.tensor([[0.37]])
    operand = format.operand({"q": codes[:, 0::2] | codes[:, 1::2] << 4, "s": scale}, (1, 16))
    assert operand.matrix.dtype == torch.bfloat16 and operand.divisor == 1
    assert torch.equal(operand.matrix.float(), format.element.values()[None])
    assert torch.equal(operand.factor, scale)


@pytest.mark.parametrize("text", [text for text in ALL if "fp32_scale" in text])
def test_fp8_block_with_fp32_scales_is_one_rounding_in_float32(text):
    format = parse(text)
    scales = torch.from_numpy(np.random.default_rng(0).lognormal(0, 10, 64).astype(np.float32))
    buffers, shape, true = every_product(format, scales, 128)
    operand = format.operand(buffers, shape)
    assert operand.matrix.dtype == torch.float32 and operand.factor is None
    torch.testing.assert_close(operand.matrix, true.float(), rtol=0, atol=0, equal_nan=True)
    finite = true.isfinite()
    assert (operand.matrix.bfloat16()[finite] != true.float()[finite]).any()  # why it is not bfloat16


@pytest.mark.parametrize("text", NVFP4)
def test_nvfp4_over_all_codes_and_scales(text):
    format = parse(text)
    rows = 127 * format.tile[0]
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(127, dtype=torch.uint8)[:, None]  # all finite non-negative E4M3
    amax = torch.from_numpy(np.random.default_rng(1).lognormal(0, 3, (rows, 1)).astype(np.float32))
    amax = amax if format.row_scaled else amax[:1]
    q = (codes[0::2] | codes[1::2] << 4).repeat(rows, 1)
    buffers = {"q": q, "s": scales, "g": amax}
    operand = format.operand(buffers, (rows, 16))

    element, e4m3 = (ELEMENTS[name].values().double() for name in (format.element_name, "e4m3"))
    true = element * e4m3[:127].repeat_interleave(format.tile[0])[:, None]
    assert operand.matrix.dtype == torch.bfloat16
    assert torch.equal(operand.matrix.double(), true)
    assert torch.equal(operand.factor, amax)
    scale_max = 256 if format.eden or (format.four_over_six and "max448" not in text) else 448
    assert operand.divisor == (eden.MAX if format.eden else format.element.max) * scale_max
    # decode rounds fl(sf * A), fl(1 / divisor), their product and the product with the code
    value = operand.matrix.double() * operand.factor.double() / operand.divisor
    torch.testing.assert_close(format.decode(buffers, (rows, 16)).double(), value, rtol=4 * 2.0**-24, atol=0)


def test_identity_operand_holds_the_values():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for text, dtype, matrix in (
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float32),
        ("fp32", torch.float32, torch.float32),
    ):
        format = parse(text)
        operand = format.operand(format.encode(x), (4, 32))
        assert operand.matrix.dtype == matrix and operand.factor is None
        assert torch.equal(operand.matrix.float(), x.to(dtype).float())
