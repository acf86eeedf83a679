"""csrc/{cpu/quantize.cpp,cuda/quantize.cu} with pointers: golden cases, strides, tails, instruction sets, errors."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import COMBINED
from support.csrc.kernel_calls import (
    BLOCK,
    CURRENT,
    FOUR_BITS,
    ISAS,
    MX,
    NVFP4,
    SPECS,
    Result,
    quantize,
    quantize_on_gpu,
    sample,
    source,
    to_bf16,
)

from hqsweep import _C
from hqsweep.formats import parse
from hqsweep.formats.elements import UE5M3

GOLDEN = Path(os.environ.get("HQSWEEP_GOLDEN", Path(__file__).parents[1] / "golden"))


def golden_cases() -> list[dict]:
    formats = {"fp8_current", "fp8_block1d", "fp8_block2d", "mxfp8", "mxfp8_2d", "nvfp4"}
    cases = json.loads((GOLDEN / "MANIFEST.json").read_text())["cases"]
    return [case for case in cases if case["format"] in formats and (GOLDEN / case["file"]).exists()]


def golden_spec(case: dict, direction: str) -> dict:
    name = case["format"]
    if name == "fp8_current":
        return CURRENT | {"element": case["fp8"], "pow2": case["pow2"], "amax_epsilon": case["amax_epsilon"]}
    if name.startswith("fp8_block"):
        options = {key: case[key] for key in ("pow2", "amax_epsilon")}
        return BLOCK | {"tile_rows": 128 if name.endswith("2d") else 1, "element": case["fp8"]} | options
    if name.startswith("mxfp8"):
        return MX | {"tile_rows": 32 if name.endswith("2d") else 1, "element": case["fp8"]}
    spec = NVFP4 | {"tile_rows": case["block"][0]}
    match case["mode"]:
        case "rht" if direction == "columnwise":
            spec |= {"rht": 16, "rht_sign": case["with_random_sign_mask"]}
        case "row_scaled":
            spec |= {"row_scaled": True}
        case "4over6":
            spec |= {"four_over_six": case["err_mode"].lower()}
            spec |= {"e4m3_max": case["nvfp4_e4m3_max"], "fast_error": case["err_use_fast_math"]}
    return spec


def golden_scale(case: dict, direction: str, stored: np.ndarray, spec: dict, shape: tuple[int, ...]) -> np.ndarray:
    """The stored scales in our orientation, one per tile, without padding."""
    if case["format"] == "fp8_block1d" or (case["format"].startswith("mxfp8") and direction == "columnwise"):
        stored = stored.T
    if case["format"] in ("mxfp8_2d", "nvfp4"):
        stored = stored[:: spec["tile_rows"]]  # the source repeats a tile's scale for each of its rows
    return stored[: shape[0], : shape[1]]


def wrong_bytes(case: dict, direction: str, arrays: np.lib.npyio.NpzFile, call=quantize) -> dict[str, int]:
    x, prefix, spec = arrays[case["input_key"]], case["prefix"], golden_spec(case, direction)
    x = x.reshape(-1, x.shape[-1])
    got = call(x if direction == "rowwise" else x.T, **spec)
    expected = arrays[f"{prefix}/{direction}_data"]
    if case["format"].startswith("mxfp8") and direction == "columnwise":
        expected = expected.T
    wrong = {"q": np.sum(got.q != expected.reshape(got.q.shape))}
    if case["format"] == "fp8_current":
        wrong["s"] = np.sum(got.s.ravel().view(np.uint32) != arrays[f"{prefix}/scale_inv"].view(np.uint32))
        return wrong
    scale = golden_scale(case, direction, arrays[f"{prefix}/{direction}_scale"], spec, got.s.shape)
    wrong["s"] = np.sum(got.s != scale)
    if case["format"] == "nvfp4":
        wrong["g"] = np.sum(got.g != arrays[f"{prefix}/amax_{direction}"])
    return wrong


CASES = golden_cases()


golden_files = pytest.mark.parametrize(
    "file", sorted({case["file"] for case in CASES}), ids=lambda file: Path(file).stem
)


@pytest.mark.feature("F21", "F23", "F24", "F25", "F26")
@golden_files
def test_golden_bytes(file, call=quantize):
    arrays, failures, checked = np.load(GOLDEN / file), {}, 0
    for case, direction in itertools.product([c for c in CASES if c["file"] == file], ("rowwise", "columnwise")):
        if f"{case['prefix']}/{direction}_data" not in arrays:
            continue
        wrong, checked = wrong_bytes(case, direction, arrays, call), checked + 1
        if any(wrong.values()):
            failures[case["id"], direction] = wrong
    assert checked > 0 and failures == {}


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("values", ["nan_bf16", "naninf_bf16", "nan_fp32", "naninf_fp32"])
def test_golden_nonfinite(values, element):
    f = np.load(next(GOLDEN.rglob("extra_nonfinite_*.npz")))
    x, mx = f[f"{values}/input"], f"{values}/mxfp8_{element}"
    for direction, view, turn in (("rowwise", x, lambda a: a), ("columnwise", x.T, lambda a: a.T)):
        got = quantize(view, **MX | {"element": element})
        assert np.array_equal(got.q, turn(f[f"{mx}/{direction}_data"]))
        assert np.array_equal(got.s, turn(f[f"{mx}/{direction}_scale"]))
    got = quantize(x, **CURRENT | {"element": element})
    assert np.array_equal(got.q, f[f"{values}/fp8cs_{element}/rowwise_data"])
    assert got.s.ravel().tobytes() == f[f"{values}/fp8cs_{element}/scale_inv"].tobytes()


def decoded_codes(result: Result, element: str) -> np.ndarray:
    codes = result.q
    if element in FOUR_BITS:
        codes = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    values, codes = np.empty(codes.shape, np.float32), np.ascontiguousarray(codes)
    _C.decode_elements(element, codes.ctypes.data, values.ctypes.data, codes.size)
    return values


def tile_scales(result: Result, spec: dict) -> np.ndarray:
    """Decoded scale of every element, fp32."""
    if spec["family"] == "current":
        return np.ones_like(result.exact)
    scales = result.s
    if spec["family"] == "mx":
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    elif spec["family"] == "ue5m3":
        scales = UE5M3.decode(torch.from_numpy(scales)).numpy()
    elif spec["family"] == "nvfp4":
        values = np.empty(scales.shape, np.float32)
        _C.decode_elements("e4m3", scales.ctypes.data, values.ctypes.data, scales.size)
        scales = values
    rows, cols = result.exact.shape
    return scales.repeat(spec["tile_rows"], 0)[:rows].repeat(spec["tile_cols"], 1)[:, :cols]


specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
WITH_AMAX = [text for text in SPECS if parse(text).amax_name and not parse(text).rht]
"""Formats whose amax is that of the matrix as it is."""


@specs
def test_exact_is_decoded_code_times_block_scale(spec):
    got = quantize(sample(40, 304), **spec)
    expected = decoded_codes(got, spec["element"]) * tile_scales(got, spec)
    assert got.exact.tobytes() == expected.tobytes()


@specs
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_any_strides_threads_and_instruction_set_give_the_same_bytes(spec, dtype):
    x = sample(150, 336)
    if dtype != "bf16":
        x = np.clip((x.astype(np.uint32) << 16).view(np.float32), -6e4, 6e4)
        x = x.astype(np.float16) if dtype == "fp16" else x
    padded = np.zeros((300, 1000), x.dtype)
    padded[::2, ::2][:150, :336] = x
    expected = quantize(x, **spec)
    assert not np.isnan(expected.exact).any()
    assert quantize(np.asfortranarray(x), **spec).same_bytes(expected)
    assert quantize(padded[::2, ::2][:150, :336], **spec).same_bytes(expected)
    assert quantize(x, threads=3, **spec).same_bytes(expected)
    for isa in ISAS:
        assert quantize(x, isa=isa, **spec).same_bytes(expected), isa


@pytest.mark.parametrize("name", WITH_AMAX)
def test_given_amax_replaces_the_scan(name):
    x = sample(32, 64)
    scanned = quantize(x, **SPECS[name])
    magnitudes = np.abs((x.astype(np.uint32) << 16).view(np.float32))
    amax = magnitudes.max(axis=1 if parse(name).row_scaled else None, keepdims=True).reshape(-1)
    assert quantize(x, amax=amax, **SPECS[name]).same_bytes(scanned)
    assert not quantize(x, amax=amax * 4, **SPECS[name]).same_bytes(scanned)


def test_stochastic_rounding_follows_key_step_and_position():
    spec = SPECS[COMBINED[0]]
    x = sample(32, 256)
    assert quantize(x, **spec).same_bytes(quantize(x, **spec))
    for other in ({"key0": 8}, {"key1": 10}, {"step": 5}, {"step": 3}):
        assert not quantize(x, **spec | other).same_bytes(quantize(x, **spec))
    x[16:] = x[:16]
    q = quantize(x, **spec).q
    assert not np.array_equal(q[16:], q[:16])


@specs
def test_empty_matrix(spec):
    got = quantize(np.empty((0, 32), np.float32), **spec)
    assert got.q.size == 0


WRONG_SPECS = {
    "family is 'fp8', must be one of current, block, mx, nvfp4, ue5m3": {"family": "fp8"},
    "element is 'e3m4', must be one of e4m3, e5m2, e2m1, e2m3, e3m2, e1m2, int8": {"element": "e3m4"},
    "family mx has scale tile 1 x 32 or 32 x 32, got 1 x 16": {"tile_cols": 16},
    "scale_rounding is 'down', must be one of up, floor, even, ceil": {"scale_rounding": "down"},
    "four_over_six and fast_error belong to family nvfp4 only": {"fast_error": True},
    "row_scaled belongs to family nvfp4, and to family current with elements of 8 bits": {"row_scaled": True},
    "tile 0 x 0 .the whole tensor., and 1 x 0 .a row. with row_scaled, got 0 x 0": {
        "family": "current",
        "tile_rows": 0,
        "tile_cols": 0,
        "row_scaled": True,
    },
    "rht and sr belong to elements e2m1 and e1m2": {"rht": 16},
    "rht is 24, must be 0, 16, 32, 64 or 128": NVFP4 | {"rht": 24},
    "family mx takes elements of floating point": {"element": "int8"},
    "four_over_six belongs to element e2m1": NVFP4 | {"element": "e1m2", "four_over_six": "mae"},
    "row_scaled needs scale tile 1 x 16, got 16 x 16": NVFP4 | {"row_scaled": True, "tile_rows": 16},
    "e4m3_max is 300.* must be 448 or 256": NVFP4 | {"e4m3_max": 300.0},
    "four_over_six cannot be combined with sr or rht": NVFP4 | {"four_over_six": "mae", "sr": True},
}


@pytest.mark.parametrize("message", WRONG_SPECS)
def test_wrong_specs_say_what_is_allowed(message):
    with pytest.raises(ValueError, match=message):
        _C.Spec(**MX | WRONG_SPECS[message])


@pytest.mark.parametrize(
    ("message", "changes"),
    {
        "threads is 0, must be at least 1": {"threads": 0},
        "isa is 'sve'; this build has base": {"isa": "sve"},
        "dtype is 3, must be 0": {"dtype": 3},
        "data is 0 but the matrix is not empty": {"data": 0},
        "row: the contracted axis has 31 elements, must be a multiple of 16": {"cols": 31},
        "column: the contracted axis has 4 elements, must be a multiple of 16": {"columnwise": True},
        "a column made from the decoded row needs the row's format": {"columnwise": True, "dequantized": True},
    }.items(),
)
def test_wrong_arguments_say_what_is_allowed(message, changes):
    x = np.zeros((4, 32), np.float32)
    to = _C.Direction(_C.Spec(**NVFP4), amax=x.ctypes.data)
    call = {"data": x.ctypes.data, "dtype": 0, "rows": 4, "cols": 32, "row_stride": 32, "col_stride": 1}
    changes = dict(changes)
    sides = {"row": None, "column": to} if changes.pop("columnwise", False) else {"row": to, "column": None}
    with pytest.raises(ValueError, match=message):
        _C.quantize_cpu(**call | sides | changes)


def test_a_global_amax_is_given_or_has_a_place():
    x = np.zeros((4, 32), np.float32)
    with pytest.raises(ValueError, match="needs `amax`, or `found` where it is found"):
        _C.quantize_cpu(x.ctypes.data, *source(x), _C.Direction(_C.Spec(**NVFP4)), None)


def test_exact_in_bf16_is_the_fp32_one_rounded():
    for name, spec in SPECS.items():
        exact = torch.from_numpy(quantize(sample(40, 304), **spec).exact).bfloat16()
        rounded = quantize(sample(40, 304), exact_dtype=np.uint16, **spec).exact
        assert np.array_equal(rounded, exact.view(torch.uint16).numpy()), name


# ---- CUDA: the same calls, and the same bytes as the CPU -------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@golden_files
def test_cuda_golden_bytes(file):
    test_golden_bytes(file, quantize_on_gpu)


def layouts(rows: int, cols: int, dtype: str) -> dict[str, np.ndarray]:
    """One matrix with rows or columns contiguous, 16-byte aligned or not, and with gaps along both axes."""
    x = np.exp2(np.random.default_rng(rows).integers(-12, 13, (rows, cols)))
    x = (x * np.random.default_rng(cols).standard_normal((rows, cols))).astype(np.float32)
    x[0, 0], x[rows // 2, cols // 2] = np.nan, -0.0
    x = to_bf16(x) if dtype == "bf16" else x.astype(np.float16 if dtype == "fp16" else np.float32)
    wide, gaps = np.zeros((rows, cols + 3), x.dtype), np.zeros((2 * rows, 2 * cols), x.dtype)
    high = np.zeros((cols, rows + 5), x.dtype)
    wide[:, :cols], gaps[::2, ::2], high[:, :rows] = x, x, x.T
    return {
        "row": x,
        "row unaligned": wide[:, :cols],
        "column": np.asfortranarray(x),
        "column unaligned": high[:, :rows].T,
        "gaps": gaps[::2, ::2],
    }


def multiple(spec: dict) -> int:
    """What the number of columns is a multiple of."""
    segments = spec["family"] in ("nvfp4", "ue5m3") or (spec["family"], spec["element"]) == ("current", "e2m1")
    least = 16 if segments or spec.get("sr") else 2 if spec["element"] in FOUR_BITS else 1
    return max(least, spec.get("rht", 0))


@gpu
@specs
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(64, 256), (33, 80), (1, 32), (300, 1040), (131, 16), (130, 6)])
def test_cuda_equals_cpu(spec, dtype, shape):
    if shape[1] % multiple(spec):
        pytest.skip("no partial segment of 16")
    for name, x in layouts(*shape, dtype).items():
        assert quantize_on_gpu(x, **spec).same_bytes(without_untouched(quantize(x, **spec), spec)), name


def without_untouched(result: Result, spec: dict) -> Result:
    """g is written by nvfp4 alone; elsewhere it keeps the garbage of outputs()."""
    return result if spec["family"] == "nvfp4" else replace(result, g=np.full_like(result.g, np.nan))


@gpu
@specs
def test_cuda_exact_in_bf16_is_the_fp32_one_rounded(spec):
    for name, x in layouts(150, 336, "bf16").items():
        exact = torch.from_numpy(quantize(x, **spec).exact).bfloat16()
        rounded = quantize_on_gpu(x, exact_dtype=np.uint16, **spec).exact
        nan = exact.isnan().numpy()
        assert np.array_equal(rounded == 0x7FC0, nan), name
        assert np.array_equal(rounded[~nan], exact.view(torch.uint16).numpy()[~nan]), name


@gpu
@pytest.mark.parametrize("name", WITH_AMAX)
def test_cuda_given_amax_replaces_the_scan(name):
    x, spec = sample(33, 64), SPECS[name]
    amax = np.exp2(np.arange(33 if spec.get("row_scaled") else 1, dtype=np.float32))
    expected = without_untouched(quantize(x, amax=amax, **spec), spec)
    assert quantize_on_gpu(x, amax=amax, **spec).same_bytes(expected)


@gpu
def test_cuda_takes_more_tiles_of_rows_than_a_grid_has_in_y():
    x = np.resize(sample(64, 16), (65536 * 32 + 1, 16))
    for view, spec in ((x, MX), (x, NVFP4), (np.asfortranarray(x), NVFP4)):
        got, expected = quantize_on_gpu(view, **spec), quantize(view, **spec)
        assert np.array_equal(got.q, expected.q) and np.array_equal(got.s, expected.s)
