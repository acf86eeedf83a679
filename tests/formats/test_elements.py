"""Element casts against ml_dtypes and torch: every bfloat16 input, the edges of float32, and every code.

The libraries agree with the hardware's saturating cast inside the range of an element, so inputs are clipped to the
range first (max + less than half a step rounds to max either way); NaN, where libraries differ, has its own test.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from hqsweep.formats import elements
from hqsweep.formats.elements import ELEMENTS, Element

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
every_element = pytest.mark.parametrize("element", [ELEMENTS[name] for name in ML_DTYPES], ids=ML_DTYPES)
"""Those that ml_dtypes has; tests/formats/test_uniform.py has the others."""


def every_bf16() -> np.ndarray:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def finite_values(element: Element) -> np.ndarray:
    """Non-negative finite values in ascending order, float32, from ml_dtypes' decoding."""
    codes = np.arange(1 << (element.bits - 1), dtype=np.uint8)
    values = codes.view(ML_DTYPES[element.name]).astype(np.float32)
    return values[np.isfinite(values)]


def fp32_edges(element: Element) -> np.ndarray:
    """Values, ties and overflow bounds with their float32 neighbours, float32's own ends, random bits; both signs."""
    values = finite_values(element)
    ties = (values[1:] + values[:-1]) / 2
    beyond = element.max + (values[-1] - values[-2]) * np.array([0.25, 0.5, 0.75, 1, 2], np.float32)
    info = np.finfo(np.float32)
    ends = np.array([info.smallest_subnormal, info.tiny, info.max, np.inf], np.float32)
    middle = np.concatenate([values, ties, beyond, ends]).astype(np.float32)
    with np.errstate(over="ignore"):  # the neighbour of the largest number is infinity
        near = np.concatenate([np.nextafter(middle, np.float32(bound)) for bound in (-np.inf, np.inf)] + [middle])
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([near, -near, random])


def encode(element: Element, x: np.ndarray) -> np.ndarray:
    return element.encode(torch.from_numpy(x)).numpy()


@every_element
@pytest.mark.parametrize("inputs", ["every bf16", "fp32 edges"])
def test_encode_equals_ml_dtypes(element, inputs):
    x = every_bf16() if inputs == "every bf16" else fp32_edges(element)
    x = x[~np.isnan(x)]
    expected = np.clip(x, -element.max, element.max).astype(ML_DTYPES[element.name]).view(np.uint8)
    np.testing.assert_array_equal(encode(element, x), expected)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("inputs", ["every bf16", "fp32 edges"])
def test_encode_equals_torch(name, inputs):
    element = ELEMENTS[name]
    x = every_bf16() if inputs == "every bf16" else fp32_edges(element)
    x = torch.from_numpy(x[~np.isnan(x)])
    expected = x.clamp(-element.max, element.max).to(TORCH[name]).view(torch.uint8)
    assert torch.equal(element.encode(x), expected)


@every_element
def test_special_inputs(element):
    sign = 1 << (element.bits - 1)
    top = int(encode(element, np.float32([element.max]))[0])
    assert encode(element, np.float32([np.inf, -np.inf, 3e38, -3e38])).tolist() == [top, top | sign] * 2
    assert encode(element, np.float32([0.0, -0.0, 1e-45, -1e-45])).tolist() == [0, sign] * 2
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    nan_code = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x07, "e2m3": 0x1F, "e3m2": 0x1F}[element.name]
    assert encode(element, nans).tolist() == [nan_code] * 4


@every_element
def test_ties_go_to_even_codes(element):
    values = finite_values(element)
    codes = encode(element, (values[1:] + values[:-1]) / 2)
    assert (codes % 2 == 0).all()
    assert (np.abs(codes.astype(int) - np.arange(len(codes)) - 0.5) == 0.5).all()


@every_element
def test_decode_equals_ml_dtypes_for_every_code(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    decoded = element.decode(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(decoded, codes.view(ML_DTYPES[element.name]).astype(np.float32))
    assert (np.signbit(decoded) == (codes >= len(codes) // 2))[~np.isnan(decoded)].all()


@pytest.mark.parametrize("name", TORCH)
def test_decode_equals_torch_for_every_code(name):
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        ELEMENTS[name].decode(codes), codes.view(TORCH[name]).float(), rtol=0, atol=0, equal_nan=True
    )


@every_element
def test_encode_inverts_decode_for_every_finite_code(element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    values = element.decode(codes)
    finite = torch.isfinite(values)
    assert torch.equal(element.encode(values[finite]), codes[finite])


@every_element
def test_constants(element):
    values = finite_values(element)
    assert element.max == values[-1]
    assert element.min_subnormal == values[1]
    assert 2.0**element.min_exponent == element.decode(torch.tensor([1 << element.mantissa_bits], dtype=torch.uint8))


def ceil_exponent(x: np.ndarray) -> np.ndarray:
    """E8M0 code of non-negative float32 by its definition: the smallest e in [0, 254] with x <= 2^(e - 127)."""
    with np.errstate(invalid="ignore"):  # of NaN
        mantissa, exponent = np.frexp(x.astype(np.float64))  # x = mantissa * 2^exponent, mantissa in [1/2, 1)
    code = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    return np.where(np.isnan(x), 255, np.where(x == 0, 0, np.where(np.isinf(x), 254, code))).astype(np.uint8)


def test_e8m0_up_is_the_smallest_power_that_covers():
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    edges = np.concatenate([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(np.inf))])
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 100_000, dtype=np.uint32)
    special = np.array([0, np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    for x in (every_bf16()[: 1 << 15], edges, bits.view(np.float32), special):
        np.testing.assert_array_equal(elements.e8m0_up(torch.from_numpy(x)).numpy(), ceil_exponent(x))


def test_e8m0_decode_equals_the_libraries_for_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = elements.e8m0_decode(codes).numpy()
    np.testing.assert_array_equal(decoded, codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(decoded, codes.view(torch.float8_e8m0fnu).float().numpy())


def test_e8m0_reciprocal_is_exact_for_every_code():
    codes = torch.arange(255, dtype=torch.uint8)
    product = elements.e8m0_decode(codes).double() * elements.e8m0_reciprocal(codes).double()
    assert torch.equal(product, torch.ones(255, dtype=torch.float64))
    assert elements.e8m0_reciprocal(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_nibbles_put_the_even_index_low_and_round_trip():
    assert elements.pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    every_pair = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 2)
    assert torch.equal(elements.unpack_nibbles(elements.pack_nibbles(every_pair)), every_pair)
