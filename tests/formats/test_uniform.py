"""Uniform grids (INT8, E1M2) and UE5M3 scales: tables by hand, and integer arithmetic of numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.elements import E1M2, INT8, UE5M3
from hqsweep.formats.inputs import draw
from hqsweep.formats.random import random_bytes
from hqsweep.ops.quantize.kernels import spec_named
from hqsweep.ops.quantize.quantize import quantize

DRAWN = ("normal", "heavy", "row_scaled", "spike", "ties", "pow2", "zeros")
KEY = RngKey(seed=3, slot="u", step=1)


def test_the_grids_are_these():
    assert E1M2.values()[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert INT8.values()[:128].tolist() == list(map(float, range(128)))
    for element in (E1M2, INT8):
        half = len(element.values()) // 2
        assert torch.equal(element.values()[half:], -element.values()[:half])
        assert element.encode(torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])).tolist() == [
            half - 1, half - 1, 2 * half - 1, half,
        ]  # fmt: skip


@pytest.mark.parametrize(("element", "step"), [(E1M2, 0.5), (INT8, 1.0)])
def test_encoding_is_the_rounding_of_an_integer(element, step):
    """Every bfloat16, and numbers beside ties."""
    x = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    x = torch.cat([x[x.isfinite()], torch.linspace(-4, 4, 4097), torch.linspace(-130, 130, 4161)])
    expected = np.clip(np.rint(x.double().numpy() / step), -element.max / step, element.max / step) * step
    assert np.array_equal(element.decode(element.encode(x)).numpy(), expected)


def test_e1m2_is_int4_halved():
    """ml_dtypes.int4 holds the rounded integers, and gives them back."""
    x = torch.linspace(-3.6, 3.6, 1001)
    integers = np.clip(np.rint(2 * x.numpy()), -7, 7).astype(ml_dtypes.int4)
    assert np.array_equal(2 * E1M2.decode(E1M2.encode(x)).numpy(), integers.astype(np.float32))


def test_ue5m3_is_half_precision_with_three_bits():
    """Every half from 0 up: the seven bits that UE5M3 lacks are rounded half to even; the largest is 114688."""
    halves = np.arange(0x7C00, dtype=np.uint16)
    kept = (halves + 0x3F + (halves >> 7 & 1)) >> 7
    assert np.array_equal(
        UE5M3.encode(torch.from_numpy(halves.view(np.float16)).float()).numpy(), kept.astype(np.uint8)
    )
    codes = torch.arange(255, dtype=torch.uint8)
    values = UE5M3.decode(codes)
    assert torch.equal(UE5M3.encode(values), codes) and values[1] == 2.0**-17 and values[-1] == 114688.0
    assert UE5M3.encode(torch.tensor([torch.inf, 1e9, torch.nan])).tolist() == [0xFE, 0xFE, 0xFF]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("text", ["int8_row", "int8_row+pow2", "int8_block", "int8_block+pow2"])
def test_int8_by_numpy(text, name):
    """Scales in float32, products in float32, and integers by rint."""
    x = draw(name, 24, 256, dtype=torch.float32)
    width = 256 if "row" in text else 128
    blocks = x.numpy().reshape(24, -1, width)
    amax = np.abs(blocks).max(2)
    scale = np.float32(127) / (np.maximum(amax, np.float32(1e-12)) if "row" in text else np.where(amax, amax, 127))
    if "pow2" in text:
        scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
        scale = np.where((amax == 0) & ("row" not in text), np.float32(1), scale)
    integers = np.rint(blocks * scale[..., None]).clip(-127, 127)
    format = parse(text)
    got = format.encode(x)
    assert np.array_equal(got["s"].numpy(), (np.float32(1) / scale).reshape(got["s"].shape))
    assert np.array_equal(INT8.decode(got["q"]).numpy(), integers.reshape(24, 256))


def test_blocks_of_the_grids_by_hand():
    # amax 7 -> 7 / 3.5 = 2: scale 2, byte 128. 7 -> 3.5, 1 -> 0.5, 2.6 -> 1.3 -> 1.5, -0.4 -> -0.2 -> -0 (tie free).
    got = parse("mxfp4+e1m2").encode(torch.tensor([[7.0, 1.0, 2.6, -0.4] + [0.0] * 28]))
    assert got["s"].tolist() == [[128]] and got["q"][0, :2].tolist() == [0x17, 0x83]
    # A = 7, S_enc = 1568 / 7 = 224; sf = 7 * 224 / 3.5 = 448, s = 0.5: the same numbers; value = 3.5 * 448 * 7 / 1568.
    format, x = parse("nvfp4+e1m2"), torch.tensor([[7.0, 1.0, 2.6, -0.4] + [0.0] * 12])
    got = format.encode(x)
    assert got["s"].tolist() == [[0x7E]] and got["q"][0, :2].tolist() == [0x17, 0x83]
    assert format.decode(got, (1, 16))[0, :4].tolist() == [7.0, 1.0, 3.0, -0.0]
    # b = 9 -> 9 / 6 = 1.5 = 0x7C (exponent 15, mantissa 4); 9 -> 6, 3 -> 2, 1 -> 0.667 -> 0.5. No amax of the tensor.
    format, x = parse("nvfp4+ue5m3"), torch.tensor([[9.0, 3.0, 1.0, 0.0] + [0.0] * 12 + [900.0] + [0.0] * 15])
    got = format.encode(x)
    assert list(got) == ["q", "s"] and got["s"][0, 0] == 0x7C and got["q"][0, :2].tolist() == [0x47, 0x01]
    assert format.decode(got, (1, 32))[0, :3].tolist() == [9.0, 3.0, 0.75]
    # 900 / 6 = 150 lies between 144 and 160: 144 = 1.125 * 2^7 is the even one's neighbour, 150 is nearer to 144.
    assert UE5M3.decode(got["s"])[0, 1] == 144.0


@pytest.mark.parametrize("text", ["mxfp4+sr+e1m2", "nvfp4+sr+e1m2", "nvfp4+ue5m3+sr+e1m2"])
def test_stochastic_rounding_on_the_uniform_grid(text):
    """floor(|x| in steps + byte / 256), by numpy, under the scales that the format has without bits."""
    format, plain = parse(text), parse(text.replace("+sr", ""))
    x = draw("normal", 32, 128, dtype=torch.float32)
    got, scales = format.encode(x, key=KEY), plain.encode(x)
    assert torch.equal(got["s"], scales["s"])
    scaled = (x / format.value_scales(got).repeat_interleave(format.tile[1], 1)).double().numpy()
    steps = np.abs(scaled) * 2 + random_bytes(KEY, 32, 128).numpy() / 256
    expected = np.copysign(np.minimum(np.floor(steps), 7) / 2, scaled)
    certain = np.abs(steps - np.rint(steps)) > 1e-3
    values = format.element.decode(format.codes(got)).numpy()
    assert certain.mean() > 0.98 and np.array_equal(values[certain], expected[certain])


@pytest.mark.parametrize("text", ["int8_row", "int8_block+2d", "mxfp4+2d+e1m2", "nvfp4+ue5m3+2d+e1m2"])
def test_kernels_take_them(text):
    x = draw("heavy", 144, 272)
    assert spec_named(text).compiled is not None
    results = [quantize(x, parse(text), parse(text), backend=backend) for backend in ("kernel", "reference")]
    for direction in ("rowwise", "columnwise"):
        kernel, reference = (getattr(result, direction) for result in results)
        assert all(torch.equal(kernel[name], reference[name]) for name in reference)


def test_4over6_is_of_e2m1():
    with pytest.raises(UserError, match="4over6 chooses between two numbers of E2M1; drop it or e1m2"):
        parse("nvfp4+4over6+e1m2")
