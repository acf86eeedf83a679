"""csrc/quantize.cpp and quantize.cu called with pointers: golden cases, strides, tails, instruction sets, errors."""

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from hqsweep import _C

GOLDEN = Path(os.environ.get("HQSWEEP_GOLDEN", Path(__file__).parents[1] / "golden"))
MX = {"family": "mx", "element": "e4m3", "tile_rows": 1, "tile_cols": 32}
NVFP4 = {"family": "nvfp4", "element": "e2m1", "tile_rows": 1, "tile_cols": 16}
CURRENT = {"family": "current", "element": "e4m3", "tile_rows": 0, "tile_cols": 0}
BLOCK = {"family": "block", "element": "e4m3", "tile_rows": 1, "tile_cols": 128, "pow2": True}
SPECS = {
    "current": CURRENT,
    "block": BLOCK,
    "block_2d": BLOCK | {"tile_rows": 128, "pow2": False, "element": "e5m2"},
    "mxfp8": MX,
    "mxfp8_2d": MX | {"tile_rows": 32},
    "mxfp6_e2m3": MX | {"element": "e2m3"},
    "mxfp6_e3m2": MX | {"element": "e3m2"},
    "mxfp4": MX | {"element": "e2m1"},
    "nvfp4": NVFP4,
    "nvfp4_2d": NVFP4 | {"tile_rows": 16},
    "nvfp4_rht_sr": NVFP4 | {"rht": True, "sr": True, "key0": 7, "key1": 9, "step": 2**40 + 3},
    "nvfp4_row_scaled": NVFP4 | {"row_scaled": True},
    "nvfp4_4over6": NVFP4 | {"four_over_six": 1, "e4m3_max": 256.0},
    "nvfp4_4over6_2d": NVFP4 | {"four_over_six": 2, "tile_rows": 16},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    q: np.ndarray
    s: np.ndarray
    g: np.ndarray
    exact: np.ndarray

    def same_bytes(self, other: "Result") -> bool:
        mine, theirs = vars(self).values(), vars(other).values()
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))


def quantize(x: np.ndarray, *, threads: int = 1, isa: str = "", amax: np.ndarray | None = None, **spec) -> Result:
    """Quantize a 2-D array of any strides (uint16 means bfloat16 bits); outputs start out as garbage."""
    rows, cols = x.shape
    packed = 2 if spec["element"] == "e2m1" else 1  # codes per byte
    tiles = [-(-n // spec[name]) if spec[name] else 1 for n, name in ((rows, "tile_rows"), (cols, "tile_cols"))]
    result = Result(
        q=np.full((rows, cols // packed), 0xAA, np.uint8),
        s=np.full(tiles, 77, np.float32 if spec["family"] in ("current", "block") else np.uint8),
        g=np.full(rows if spec.get("row_scaled") else 1, np.nan, np.float32),
        exact=np.full((rows, cols), np.nan, np.float32),
    )
    _C.quantize_cpu(
        x.ctypes.data,
        {"uint16": "bf16", "float32": "fp32", "float16": "fp16"}[x.dtype.name],
        rows,
        cols,
        *(stride // x.itemsize for stride in x.strides),
        **spec,
        q_ptr=result.q.ctypes.data,
        s_ptr=result.s.ctypes.data,
        g_ptr=result.g.ctypes.data,
        exact_ptr=result.exact.ctypes.data,
        amax_ptr=0 if amax is None else amax.ctypes.data,
        threads=threads,
        isa=isa,
    )
    return result


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sample(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Normal values over many binades, with zeros of both signs, as bfloat16 bits."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-20, 20, (rows, cols)))
    x[rng.random((rows, cols)) < 0.02] = -0.0
    return to_bf16(x)


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
            spec |= {"rht": True, "rht_sign": case["with_random_sign_mask"]}
        case "row_scaled":
            spec |= {"row_scaled": True}
        case "4over6":
            spec |= {"four_over_six": {"MAE": 1, "MSE": 2}[case["err_mode"]]}
            spec |= {"e4m3_max": case["nvfp4_e4m3_max"], "fast_error": case["err_use_fast_math"]}
    return spec


def golden_scale(case: dict, direction: str, stored: np.ndarray, spec: dict, shape: tuple[int, ...]) -> np.ndarray:
    """The stored scales in our orientation, one per tile, without padding."""
    if case["format"] == "fp8_block1d" or (case["format"].startswith("mxfp8") and direction == "columnwise"):
        stored = stored.T
    if case["format"] in ("mxfp8_2d", "nvfp4"):
        stored = stored[:: spec["tile_rows"]]  # the source repeats a tile's scale for each of its rows
    return stored[: shape[0], : shape[1]]


def wrong_bytes(case: dict, direction: str, arrays: np.lib.npyio.NpzFile) -> dict[str, int]:
    x, prefix, spec = arrays[case["input_key"]], case["prefix"], golden_spec(case, direction)
    x = x.reshape(-1, x.shape[-1])
    got = quantize(x if direction == "rowwise" else x.T, **spec)
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


@pytest.mark.parametrize("file", sorted({case["file"] for case in CASES}), ids=lambda file: Path(file).stem)
def test_golden_bytes(file):
    arrays, failures, checked = np.load(GOLDEN / file), {}, 0
    for case, direction in itertools.product([c for c in CASES if c["file"] == file], ("rowwise", "columnwise")):
        if f"{case['prefix']}/{direction}_data" not in arrays:
            continue
        wrong, checked = wrong_bytes(case, direction, arrays), checked + 1
        if any(wrong.values()):
            failures[case["id"], direction] = wrong
    assert checked > 0 and failures == {}


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["nan_bf16", "naninf_bf16", "nan_fp32", "naninf_fp32"])
def test_golden_nonfinite(source, element):
    f = np.load(next(GOLDEN.rglob("extra_nonfinite_*.npz")))
    x, mx = f[f"{source}/input"], f"{source}/mxfp8_{element}"
    for direction, view, turn in (("rowwise", x, lambda a: a), ("columnwise", x.T, lambda a: a.T)):
        got = quantize(view, **MX | {"element": element})
        assert np.array_equal(got.q, turn(f[f"{mx}/{direction}_data"]))
        assert np.array_equal(got.s, turn(f[f"{mx}/{direction}_scale"]))
    got = quantize(x, **CURRENT | {"element": element})
    assert np.array_equal(got.q, f[f"{source}/fp8cs_{element}/rowwise_data"])
    assert got.s.ravel().tobytes() == f[f"{source}/fp8cs_{element}/scale_inv"].tobytes()


def decoded_codes(result: Result, element: str) -> np.ndarray:
    codes = result.q
    if element == "e2m1":
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
    elif spec["family"] == "nvfp4":
        values = np.empty(scales.shape, np.float32)
        _C.decode_elements("e4m3", scales.ctypes.data, values.ctypes.data, scales.size)
        scales = values
    rows, cols = result.exact.shape
    return scales.repeat(spec["tile_rows"], 0)[:rows].repeat(spec["tile_cols"], 1)[:, :cols]


specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


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
    assert quantize(x, isa="base", **spec).same_bytes(expected)


@pytest.mark.parametrize("name", ["current", "nvfp4", "nvfp4_row_scaled"])
def test_given_amax_replaces_the_scan(name):
    x = sample(32, 64)
    found = quantize(x, **SPECS[name])
    magnitudes = np.abs((x.astype(np.uint32) << 16).view(np.float32))
    amax = magnitudes.max(axis=1 if name == "nvfp4_row_scaled" else None, keepdims=True).reshape(-1)
    assert quantize(x, amax=amax, **SPECS[name]).same_bytes(found)
    assert not quantize(x, amax=amax * 4, **SPECS[name]).same_bytes(found)


def test_stochastic_rounding_follows_key_step_and_position():
    spec = SPECS["nvfp4_rht_sr"]
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


WRONG = {
    "family is 'fp8', must be one of current, block, mx, nvfp4": {"family": "fp8"},
    "element is 'e3m4', must be one of e4m3, e5m2, e2m1, e2m3, e3m2": {"element": "e3m4"},
    "family mx has scale tile 1 x 32 or 32 x 32, got 1 x 16": {"tile_cols": 16},
    "cols is 31, must be a multiple of 2": {"element": "e2m1", "cols": 31},
    "belong to family nvfp4 only": {"rht": True},
    "cols is 31, must be a multiple of 16": NVFP4 | {"cols": 31},
    "row_scaled needs scale tile 1 x 16, got 16 x 16": NVFP4 | {"row_scaled": True, "tile_rows": 16},
    "e4m3_max is 300.* must be 448 or 256": NVFP4 | {"e4m3_max": 300.0},
    "four_over_six cannot be combined with sr or rht": NVFP4 | {"four_over_six": 1, "sr": True},
    "threads is 0, must be at least 1": {"threads": 0},
    "isa is 'sve', this build and processor have base": {"isa": "sve"},
    "dtype is 'fp64', must be one of fp32, bf16, fp16": {"dtype": "fp64"},
    "src_ptr is 0 but the matrix is not empty": {"src_ptr": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_say_what_is_allowed(message):
    x = np.zeros((4, 32), np.float32)
    call = {"src_ptr": x.ctypes.data, "dtype": "fp32", "rows": 4, "cols": 32, "row_stride": 32, "col_stride": 1}
    with pytest.raises(ValueError, match=message):
        _C.quantize_cpu(**call | MX | WRONG[message])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m3", "e3m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 256), (33, 80), (1, 32), (300, 1000), (131, 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_cuda_equals_cpu(element, dtype, shape, transposed):
    spec, (rows, cols) = MX | {"element": element}, shape
    x = torch.randn(*(shape[::-1] if transposed else shape), generator=torch.Generator().manual_seed(rows))
    x = torch.where(x > 1.5, 1e4 * x, x)
    x[0, 0] = float("nan")
    x = x.to(dtype).t() if transposed else x.to(dtype)
    bits = x.view(torch.uint16).numpy() if dtype == torch.bfloat16 else x.numpy()
    expected, device = quantize(bits, **spec), x.cuda()
    assert device.stride() == x.stride()
    q = torch.full((rows, cols), 0xAA, dtype=torch.uint8, device="cuda")
    s = torch.full((rows, -(-cols // 32)), 0xAA, dtype=torch.uint8, device="cuda")
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    outputs = {"q_ptr": q.data_ptr(), "s_ptr": s.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream}
    _C.quantize_cuda(device.data_ptr(), name, rows, cols, *device.stride(), **spec, **outputs)
    assert np.array_equal(s.cpu().numpy(), expected.s)
    assert np.array_equal(q.cpu().numpy(), expected.q)
