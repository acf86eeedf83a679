"""csrc/numerics.h value by value: every bfloat16 input and every code, against ml_dtypes and the golden vectors."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hqsweep import _C

GOLDEN = Path(os.environ.get("HQSWEEP_GOLDEN", Path(__file__).parents[1] / "golden"))
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}
elements = pytest.mark.parametrize("element", MAX)


def golden(name: str) -> np.lib.npyio.NpzFile:
    paths = sorted(GOLDEN.rglob(name))
    if not paths:
        pytest.skip(f"{GOLDEN} has no {name}")
    return np.load(paths[0])


def cast(element: str, x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    codes = np.full(x.shape, 0xEE, np.uint8)
    _C.cast_elements(element, x.ctypes.data, codes.ctypes.data, x.size)
    return codes


def decode(element: str, codes: np.ndarray) -> np.ndarray:
    values = np.full(codes.shape, np.nan, np.float32)
    _C.decode_elements(element, codes.ctypes.data, values.ctypes.data, codes.size)
    return values


def e8m0_up(x: np.ndarray) -> np.ndarray:
    codes = np.full(x.shape, 0xEE, np.uint8)
    _C.e8m0_up(x.ctypes.data, codes.ctypes.data, x.size)
    return codes


def every_bf16() -> np.ndarray:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def ties_and_neighbours(element: str) -> np.ndarray:
    """Every value of the format and every midpoint, with the fp32 numbers next to each, both signs."""
    values = np.arange(1 << (BITS[element] - 1), dtype=np.uint8).view(ML_DTYPES[element]).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)]).astype(np.float32)
    return np.concatenate([near, -near])


@elements
@pytest.mark.parametrize("inputs", [every_bf16, ties_and_neighbours], ids=["every_bf16", "ties"])
def test_encode_rounds_like_ml_dtypes_within_range(element, inputs):
    x = inputs() if inputs is every_bf16 else inputs(element)
    x = x[np.abs(x) <= MAX[element]]
    assert len(x) > 80
    assert np.array_equal(cast(element, x), x.astype(ML_DTYPES[element]).view(np.uint8))


@elements
def test_encode_saturates_and_maps_nan(element):
    x = every_bf16()
    codes, largest = cast(element, x), int(cast(element, np.float32([MAX[element]]))[0])
    sign = 1 << (BITS[element] - 1)
    above = x > MAX[element]  # includes +inf
    assert above.sum() > 1000 and (codes[above] == largest).all()
    assert (codes[x < -MAX[element]] == largest | sign).all()
    assert np.isnan(x).sum() == 254 and (codes[np.isnan(x)] == NAN_CODE[element]).all()
    assert cast(element, np.float32([0.0, -0.0])).tolist() == [0, sign]


@elements
def test_decode_every_code(element):
    codes = np.arange(1 << BITS[element], dtype=np.uint8)
    expected = codes.view(ML_DTYPES[element]).astype(np.float32)
    assert np.array_equal(decode(element, codes), expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(cast(element, decode(element, codes)[finite]), codes[finite])  # the sign of zero, too


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_casts_equal_the_cuda_headers(element):
    f = golden("extra_casts_*.npz")
    assert np.array_equal(cast(element, f["input"]), f[element])
    codes = np.arange(len(f[f"{element}_decode"]), dtype=np.uint8)
    assert np.array_equal(decode(element, codes), f[f"{element}_decode"], equal_nan=True)


def test_e8m0_up_equals_transformer_engine():
    f = golden("extra_casts_*.npz")
    assert np.array_equal(e8m0_up(f["e8m0_input"]), f["e8m0_up"])


def test_e8m0_up_is_the_smallest_power_not_below():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 0x7F000000, 200_000, dtype=np.uint32, endpoint=True).view(np.float32)  # up to 2^127
    powers = np.ldexp(1.0, np.arange(-127, 128))
    assert np.array_equal(e8m0_up(x), np.searchsorted(powers, x.astype(np.float64)))
    edges = np.uint32([0, 0x400000, 0x400001, 0x800000, 0x800001, 0x7F000001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    assert e8m0_up(edges.view(np.float32)).tolist() == [0, 0, 1, 1, 2, 0xFE, 0xFE, 0xFE, 0xFF]


@pytest.mark.slow
@elements
def test_scale_from_reciprocal_equals_scale_from_division(element):
    """e8m0_up(amax * fl(1/max)) == e8m0_up(amax / max) for every mantissa, in a normal and in the lowest binades."""
    fmax, mantissas = np.float32(MAX[element]), np.arange(1 << 23, dtype=np.uint32)
    for exponent in (0, 1, 100, 254):
        amax = (mantissas | np.uint32(exponent << 23)).view(np.float32)
        assert np.array_equal(e8m0_up(amax * (np.float32(1) / fmax)), e8m0_up(amax / fmax)), exponent


def e8m0_scale(rounding: str, element: str, amax: np.ndarray) -> np.ndarray:
    codes = np.full(amax.shape, 0xEE, np.uint8)
    _C.e8m0_scale(rounding, element, amax.ctypes.data, codes.ctypes.data, amax.size)
    return codes


@elements
@pytest.mark.parametrize("rounding", ["floor", "even"])
def test_e8m0_scale_is_the_power_below_over_the_largest_power_of_the_element(element, rounding):
    """By the words of OCP MX v1.0 section 6.3, in float64; even first rounds to the element's mantissa, ties up."""
    rng = np.random.default_rng(0)
    amax = rng.integers(1, 0x7F800000, 200_000, dtype=np.uint32).view(np.float32)
    bits = {"e4m3": 3, "e5m2": 2, "e2m1": 1, "e2m3": 3, "e3m2": 2}[element]
    ties = (2 - 2.0 ** -(bits + 1)) * np.ldexp(1.0, np.arange(-120, 127))
    ties = ties.astype(np.float32)
    amax = np.concatenate([amax, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    fraction, exponent = np.frexp(amax.astype(np.float64))  # in [1/2, 1)
    if rounding == "even":
        exponent += np.floor(fraction * 2 ** (bits + 1) + 0.5) == 2 ** (bits + 1)
    emax = int(np.floor(np.log2(MAX[element])))
    assert np.array_equal(e8m0_scale(rounding, element, amax), np.clip(exponent - 1 - emax + 127, 0, 254))
    ends = np.float32([0.0, np.inf, np.nan])
    assert e8m0_scale(rounding, element, ends).tolist() == [0, 255 - emax, 255]


@elements
def test_e8m0_scale_up_is_that_of_the_quotient(element):
    amax = np.random.default_rng(1).integers(0, 0x7F800001, 200_000, dtype=np.uint32).view(np.float32)
    assert np.array_equal(e8m0_scale("up", element, amax), e8m0_up(amax / np.float32(MAX[element])))


def test_stochastic_rounding_equals_transformer_engine():
    f = golden("extra_sr_*.npz")
    x, random = np.ascontiguousarray(f["x"]), np.ascontiguousarray(f["rbits8"].astype(np.uint8))
    codes = np.full(x.shape, 0xEE, np.uint8)
    _C.stochastic_e2m1(x.ctypes.data, random.ctypes.data, codes.ctypes.data, x.size)
    assert np.array_equal(codes, f["e2m1_code"])


def test_stochastic_rounding_is_unbiased_over_its_bytes():
    random = np.arange(256, dtype=np.uint8)
    codes = np.empty(256, np.uint8)
    for value in np.arange(-6, 6, 1 / 256, dtype=np.float32):
        x = np.full(256, value, np.float32)
        _C.stochastic_e2m1(x.ctypes.data, random.ctypes.data, codes.ctypes.data, 256)
        assert abs(decode("e2m1", codes).mean() - value) <= 1 / 128  # one of 256 bytes times the step


def test_philox_known_answers():
    """The test vectors of Random123 (kat_vectors, philox4x32 10)."""
    full = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert _C.philox(0, 0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _C.philox(full, full, full, full, full, full) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _C.philox(0xA4093822, 0x299F31D0, *pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_philox_equals_transformer_engine():
    f = golden("extra_sr_*.npz")
    for (seed, sequence, offset), words in zip(f["philox_seed_seq_offset"].tolist(), f["philox_u32"], strict=True):
        drawn = []
        for i in range(len(words) // 4):
            counter = (offset + i) | sequence << 64
            drawn += _C.philox(seed & 0xFFFFFFFF, seed >> 32, *((counter >> 32 * k) & 0xFFFFFFFF for k in range(4)))
        assert drawn == words.tolist()


def test_build_info_says_how_numbers_were_compiled():
    info = _C.build_info()
    flags = info["cxx_flags"].split()
    assert "-ffp-contract=off" in flags and "-fno-fast-math" in flags
    assert not any(flag in info["cxx_flags"] for flag in ("-Ofast", " -ffast-math", "-march="))
    assert info["isa"] in info["isas"].split()
    if info["cuda"]:
        assert {"-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"} <= set(info["cuda_flags"].split())


@pytest.mark.parametrize("divisor", [6.0, 1536.0, 2688.0])
def test_quotients_of_the_fast_encoder_are_rounded_once(divisor):
    """divided() and divided_near() of csrc/cuda/fast.cuh: every mantissa, and what lies below the normal numbers."""
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    one, least = (mantissas | np.uint32(exponent << 23) for exponent in (127, 0))
    for bits in (one, least):
        x = bits.view(np.float32)
        exact = x / np.float32(divisor)
        assert np.array_equal((x.astype(np.float64) * (1 / divisor)).astype(np.float32), exact)
    reciprocal, x = np.float32(1) / np.float32(divisor), one.view(np.float32)
    quotient = x * reciprocal
    rest = (x - quotient.astype(np.float64) * divisor).astype(np.float32)
    near = (rest.astype(np.float64) * reciprocal + quotient).astype(np.float32)
    assert np.array_equal(near, x / np.float32(divisor)) and not np.array_equal(quotient, near)
