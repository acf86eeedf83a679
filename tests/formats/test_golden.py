"""Every byte of the golden vectors: codes, scales, amaxes and decoded values of all formats, rowwise and columnwise.

The vectors come from TransformerEngine and the CUDA headers (tests/golden/README.md). HQSWEEP_GOLDEN=DIR takes any
other folder of the same layout: MANIFEST.json, the .npz files it lists, and te_h200*.safetensors anywhere below.
Columnwise means the format applied to x.T, so columnwise arrays are turned to that orientation first. Only the sign of
zero may differ, and only in cases that the manifest marks as disputed or that carry alternative arrays.
"""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hqsweep.formats import Format, parse
from hqsweep.formats.delayed import end_step
from hqsweep.formats.elements import ELEMENTS, e8m0_decode, e8m0_up
from hqsweep.formats.fp8 import FLT_MAX, fp8_scale
from hqsweep.formats.nvfp4 import stochastic_e2m1
from hqsweep.ops.quantize import dequantize, quantize

COMMITTED = Path(__file__).parents[1] / "golden"
ROOT = Path(os.environ.get("HQSWEEP_GOLDEN", COMMITTED))
DIRECTIONS = ("rowwise", "columnwise")
H200_KINDS = {
    "cur": {"format": "fp8_current", "pow2": False},
    "curp2": {"format": "fp8_current", "pow2": True},
    "blk1": {"format": "fp8_block1d", "pow2": True},
    "blk1np": {"format": "fp8_block1d", "pow2": False},
    "blk2": {"format": "fp8_block2d", "pow2": True},
    "blk2np": {"format": "fp8_block2d", "pow2": False},
}
# name of an array in the .npz files -> TransformerEngine's attribute
H200_CURRENT = {"rowwise_data": "_data", "columnwise_data": "_transpose", "scale_inv": "_scale_inv"}
H200_BLOCK = {
    "rowwise_data": "_rowwise_data",
    "columnwise_data": "_columnwise_data",
    "rowwise_scale": "_rowwise_scale_inv",
    "columnwise_scale": "_columnwise_scale_inv",
}
QUANTIZERS = {"fp8_current", "fp8_block1d", "fp8_block2d", "mxfp8", "mxfp8_2d", "nvfp4"}


def find_cases() -> list[dict]:
    cases = json.loads((ROOT / "MANIFEST.json").read_text())["cases"]
    for path in sorted(ROOT.rglob("te_h200*.safetensors")):
        keys = opened(path).keys()
        for stem in sorted({key.split("/")[0] for key in keys if "/" in key}):
            kind, fp8, source = stem.split("_", 2)
            case = {"id": stem, "file": path.relative_to(ROOT).as_posix(), "prefix": stem, "input_key": f"x_{source}"}
            names = H200_CURRENT if kind.startswith("cur") else H200_BLOCK
            cases.append(case | H200_KINDS[kind] | {"fp8": fp8, "names": names})
    return cases


@lru_cache(maxsize=4)
def opened(path: Path):
    return safe_open(path, "pt") if path.suffix == ".safetensors" else np.load(path)


class Arrays:
    """The arrays of one case by their bare names, as numpy (bfloat16 as its bits)."""

    def __init__(self, case: dict) -> None:
        self.file = opened(ROOT / case["file"])
        self.native = isinstance(self.file, np.lib.npyio.NpzFile)
        self.names = case.get("names", {})
        self.prefix = f"{case['prefix']}/" if case["prefix"] else ""
        self.keys = set(self.file.keys())

    def _key(self, name: str) -> str:
        return self.prefix + self.names.get(name, name)

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self.keys

    def __getitem__(self, name: str) -> np.ndarray:
        return self.raw(self._key(name))

    def raw(self, key: str) -> np.ndarray:
        if self.native:
            return self.file[key]
        tensor = self.file.get_tensor(key)
        return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def format_of(case: dict, direction: str) -> Format:
    """The format that reproduces this case in this direction."""
    name, words = case["format"], []
    if name.startswith("fp8_block"):
        words = ["fp8_block"] + ["2d"] * name.endswith("2d") + ["fp32_scale"] * (not case["pow2"])
    elif name == "fp8_current":
        words = ["fp8_current"] + ["pow2"] * case["pow2"]
    elif name == "nvfp4":
        words = ["nvfp4"] + ["2d"] * (case["block"] == [16, 16]) + nvfp4_options(case, direction)
    else:
        words = ["mxfp8"] + ["2d"] * name.endswith("2d")
    words += ["e5m2"] * (case.get("fp8") == "e5m2")
    words += [f"eps{case['amax_epsilon']}"] if case.get("amax_epsilon") else []
    return parse("+".join(words))


def nvfp4_options(case: dict, direction: str) -> list[str]:
    if case["mode"] == "rht" and direction == "columnwise":
        return ["rht"] + ["nosign"] * (not case["with_random_sign_mask"])
    if case["mode"] == "row_scaled":
        return ["row_scaled"]
    if case["mode"] == "4over6":
        mse, fast, full = case["err_mode"] == "MSE", case["err_use_fast_math"], case["nvfp4_e4m3_max"] == 448
        return ["4over6"] + ["mse"] * mse + ["fast_error"] * fast + ["max448"] * full
    return []


def as_matrix(array: np.ndarray) -> torch.Tensor:
    """Golden input -> [M, K] bfloat16 or float32."""
    x = torch.from_numpy(array)
    return (x.view(torch.bfloat16) if x.dtype == torch.uint16 else x).reshape(-1, x.shape[-1])


def golden_buffers(case: dict, arrays: Arrays, direction: str, format: Format, rows: int, cols: int) -> dict:
    """Golden arrays of one direction as the format's buffers for the matrix [rows, cols] that is encoded."""
    transpose = case["format"].startswith("mxfp8") and direction == "columnwise"  # all others are stored transposed
    data = torch.from_numpy(arrays[f"{direction}_data"])
    buffers = {"q": (data.T if transpose else data).reshape(rows, -1)}
    if case["format"] == "fp8_current":
        return buffers | {"s": torch.from_numpy(arrays["scale_inv"]).reshape(1, 1)}
    scale = torch.from_numpy(arrays[f"{direction}_scale"])
    if case["format"] == "fp8_block1d":
        scale = scale[:, :rows].T
    elif case["format"] == "fp8_block2d":
        scale = scale[:, : -(-cols // 128)]
    else:
        scale = scale.T if transpose else scale
        tile_rows = format.tile[0]  # the scale of a tile is stored once for each of its rows
        assert torch.equal(scale, scale[::tile_rows].repeat_interleave(tile_rows, 0)[: len(scale)])
        scale = scale[::tile_rows]
    if case["format"] == "nvfp4":
        buffers["g"] = torch.from_numpy(arrays[f"amax_{direction}"]).reshape(-1, 1)
    return buffers | {"s": scale}


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to the bit; the message shows the first differences."""
    assert got.dtype == expected.dtype
    integer = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.element_size()]
    got, expected = (tensor.contiguous().numpy().view(integer) for tensor in (got, expected))
    np.testing.assert_array_equal(got, expected, err_msg=what)


def check_quantizer(case: dict, arrays: Arrays) -> None:
    x = as_matrix(arrays.raw(case["input_key"]))
    for direction in directions(arrays):
        view = x if direction == "rowwise" else x.T.contiguous()
        format = format_of(case, direction)
        golden = golden_buffers(case, arrays, direction, format, *view.shape)
        check_encoded(case, arrays, direction, format.encode(view), golden)
        if case["format"] == "fp8_current" and "amax" in arrays:
            check_current_scale(arrays, format, view)
        if "rht_bf16_bits" in arrays and direction == "columnwise":
            bits = torch.from_numpy(arrays["rht_bf16_bits"])
            assert_same(format.basis(view).bfloat16().view(torch.uint16), bits, f"{format}: transform")
        check_decoded(case, arrays, direction, format.decode(golden, view.shape))


def check_kernel(case: dict, arrays: Arrays, device: str) -> None:
    """All directions of the case from one call, and the golden codes decoded by the kernel."""
    x = as_matrix(arrays.raw(case["input_key"]))
    formats = {direction: format_of(case, direction) for direction in directions(arrays)}
    made = quantize(x.to(device), *(formats.get(direction) for direction in DIRECTIONS), backend="kernel")
    for direction, format in formats.items():
        view = x if direction == "rowwise" else x.T
        golden = golden_buffers(case, arrays, direction, format, *view.shape)
        got = {name: buffer.cpu() for name, buffer in getattr(made, direction).items()}
        check_encoded(case, arrays, direction, got, golden)
        on_device = {name: buffer.contiguous().to(device) for name, buffer in golden.items()}
        decoded = dequantize(on_device, format, tuple(view.shape), backend="kernel")
        check_decoded(case, arrays, direction, decoded.cpu())


def directions(arrays: Arrays) -> list[str]:
    present = [direction for direction in DIRECTIONS if f"{direction}_data" in arrays]
    assert present
    return present


def check_encoded(case: dict, arrays: Arrays, direction: str, got: dict, expected: dict) -> None:
    format = format_of(case, direction)
    where = f"{direction} {format}"
    assert got.keys() == expected.keys() == format.layout.keys()
    for name in set(expected) - {"q"}:
        assert_same(got[name], expected[name], f"{where}: {name}")
    codes, golden = format.codes(got), format.codes(expected)
    if "disputed" in case or any(f"{word}_{direction}_data" in arrays for word in ("specialized", "kernel")):
        codes, golden = (unsigned_zero(each, format.element_bits) for each in (codes, golden))
    assert_same(codes, golden, f"{where}: codes")


def unsigned_zero(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.where(codes == 1 << (bits - 1), 0, codes)


def check_current_scale(arrays: Arrays, format: Format, x: torch.Tensor) -> None:
    amax = format.grid(x)["s"]
    assert_same(amax.reshape(1), torch.from_numpy(arrays["amax"]), "amax")
    options = {"fp8_max": format.element.max, "epsilon": format.amax_epsilon, "pow2": format.pow2}
    scale = fp8_scale(amax, **options, inf_value=FLT_MAX)
    assert_same(scale.reshape(1), torch.from_numpy(arrays["scale"]), "scale")


def check_decoded(case: dict, arrays: Arrays, direction: str, decoded: torch.Tensor) -> None:
    name = f"{direction}_dequant"
    if direction == "columnwise" and case["format"] != "nvfp4":  # nvfp4 keeps the orientation of its codes
        decoded = decoded.T.contiguous()
    if name in arrays:
        assert_same(decoded, torch.from_numpy(arrays[name]).reshape(decoded.shape), name)
    meta = json.loads(str(arrays.file["__meta__"])) if arrays.native else {}
    digest = meta.get("cases", {}).get(case["prefix"], {}).get("sha256", {}).get(name)
    if digest:
        assert hashlib.sha256(decoded.numpy().astype("<f4").tobytes()).hexdigest() == digest, f"SHA-256 of {name}"


def check_casts(case: dict, arrays: Arrays) -> None:
    x = torch.from_numpy(arrays["input"])
    for name in ("e4m3", "e5m2", "e2m1"):
        assert_same(ELEMENTS[name].encode(x), torch.from_numpy(arrays[name]), name)
        codes = torch.arange(len(arrays[f"{name}_decode"]), dtype=torch.uint8)
        np.testing.assert_array_equal(ELEMENTS[name].decode(codes).numpy(), arrays[f"{name}_decode"])
    assert_same(e8m0_up(torch.from_numpy(arrays["e8m0_input"])), torch.from_numpy(arrays["e8m0_up"]), "e8m0 up")
    np.testing.assert_array_equal(e8m0_decode(torch.arange(256)).numpy(), arrays["e8m0_decode"])


def check_stochastic_rounding(case: dict, arrays: Arrays) -> None:
    bits = torch.from_numpy(arrays["rbits8"].astype(np.uint8))
    codes = stochastic_e2m1(torch.from_numpy(arrays["x"]), bits)
    assert_same(codes, torch.from_numpy(arrays["e2m1_code"]), "codes")
    np.testing.assert_array_equal(ELEMENTS["e2m1"].decode(codes).numpy(), arrays["e2m1_value"])


def check_rht_matrix(case: dict, arrays: Arrays) -> None:
    for name, text in (("matrix_with_sign", "nvfp4+rht"), ("matrix_no_sign", "nvfp4+rht+nosign")):
        assert_same(parse(text).basis(torch.eye(16)), torch.from_numpy(arrays[name]), name)


def check_nonfinite(case: dict, arrays: Arrays) -> None:
    quantizers = {key.rsplit("/", 1)[0] for key in arrays.keys if key.endswith("/rowwise_data")}
    assert quantizers
    for prefix in sorted(quantizers):
        source, name = prefix.split("/")
        kind, fp8 = name.split("_")
        fields = {"prefix": prefix, "input_key": f"{source}/input", "fp8": fp8, "pow2": False}
        part = case | fields | {"format": {"mxfp8": "mxfp8", "fp8cs": "fp8_current"}[kind]}
        check_quantizer(part, Arrays(part))


def check_delayed(case: dict, arrays: Arrays) -> None:
    """Each slot of each case, step by step: history and scale after TransformerEngine's fused update."""
    for name, facts in json.loads(str(arrays.file["__meta__"]))["cases"].items():
        recorded, scales, histories = (torch.from_numpy(arrays[f"{name}/{k}"]) for k in ("amax", "scale", "history"))
        scaled_max = ELEMENTS[facts["fp8"]].max * 2.0 ** -facts["margin"]
        for slot in range(recorded.shape[1]):
            history, amax = torch.zeros(facts["L"]), torch.zeros(1, 1)
            for step in range(len(recorded)):
                history[0] = recorded[step, slot]
                history, amax = end_step(history, amax, most_recent=facts["algo"] == "most_recent")
                scale = fp8_scale(amax, fp8_max=scaled_max, epsilon=0.0, pow2=False, inf_value=FLT_MAX)
                where = f"{name} slot {slot} after step {step}"
                assert_same(history, histories[step, :, slot], f"{where}: history")
                assert_same(scale.view(()), scales[step, slot], f"{where}: scale")


CHECKS = dict.fromkeys(QUANTIZERS, check_quantizer) | {
    "casts": check_casts,
    "fp8_delayed": check_delayed,
    "stochastic_rounding": check_stochastic_rounding,
    "rht_matrix": check_rht_matrix,
    "nonfinite": check_nonfinite,
}
CASES = find_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case):
    CHECKS[case["format"]](case, Arrays(case))


QUANTIZER_CASES = [case for case in CASES if case["format"] in QUANTIZERS]


@pytest.mark.parametrize("case", QUANTIZER_CASES, ids=lambda case: case["id"])
def test_kernel_makes_both_directions_in_one_call(case):
    check_kernel(case, Arrays(case), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", QUANTIZER_CASES, ids=lambda case: case["id"])
def test_cuda_kernel_makes_both_directions_in_one_call(case):
    check_kernel(case, Arrays(case), "cuda")


def test_committed_cases_cover_every_reference():
    manifest = json.loads((COMMITTED / "MANIFEST.json").read_text())["cases"]
    quantizers = [case for case in manifest if case["format"] in QUANTIZERS]
    options = {str(format_of(case, direction)) for case in quantizers for direction in DIRECTIONS}
    assert options == {
        *(f"fp8_current{o}" for o in ("", "+pow2", "+e5m2", "+e5m2+pow2", "+eps16.0")),
        *(f"fp8_block{o}" for o in ("", "+e5m2", "+fp32_scale", "+eps16.0", "+2d", "+2d+fp32_scale")),
        *("fp8_block+e5m2+2d+fp32_scale", "mxfp8", "mxfp8+e5m2", "mxfp8+2d", "nvfp4", "nvfp4+2d", "nvfp4+row_scaled"),
        *("nvfp4+rht", "nvfp4+rht+nosign", "nvfp4+4over6+mse", "nvfp4+2d+4over6", "nvfp4+4over6+max448"),
        *("nvfp4+4over6+fast_error+max448", "nvfp4+2d+4over6+mse+fast_error+max448"),
    }
    assert {(case["input_dtype"]) for case in quantizers} == {"bf16", "fp32"}
    distributions = {case["dist"] for case in quantizers}
    assert distributions >= {"tiny", "huge", "widerange", "spike", "negzero", "all_zeros", "zeros_block", "pow2_edge"}
