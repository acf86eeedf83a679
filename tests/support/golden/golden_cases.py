"""Reads the golden vectors (README.md): the cases, the arrays of one, and the format and buffers that they stand for.

HQSWEEP_GOLDEN=DIR takes any other folder of the same layout: MANIFEST.json, the .npz files it lists, and
te_h200*.safetensors anywhere below. Columnwise means the format applied to x.T, so columnwise arrays are turned to that
orientation first. Only the sign of zero may differ, and only in cases that the manifest marks as disputed or that carry
alternative arrays.
"""

import json
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from hqsweep.formats import Format, parse
from hqsweep.gemm.native import swizzle

COMMITTED = Path(__file__).parents[2] / "golden"
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
UNREAD = {
    "unfused_history": "TransformerEngine's Python path; the formats reproduce its fused update",
    "unfused_scale": "as unfused_history",
}
"""Arrays that no check compares, by their last name, and why."""
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
        self.read: set[str] = set()

    def _key(self, name: str) -> str:
        return self.prefix + self.names.get(name, name)

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self.keys

    def __getitem__(self, name: str) -> np.ndarray:
        return self.raw(self._key(name))

    def raw(self, key: str) -> np.ndarray:
        self.read.add(key)
        if self.native:
            return self.file[key]
        tensor = self.file.get_tensor(key)
        return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()

    def unread(self) -> list[str]:
        """Arrays of the case that no check has read, without those of UNREAD."""
        own = {key for key in self.keys - self.read if key.startswith(self.prefix) and key != "__meta__"}
        return sorted(key for key in own if key.rsplit("/", 1)[-1] not in UNREAD)


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


def is_untransposed(case: dict, name: str) -> bool:
    """Whether a columnwise array has the orientation of x, as MXFP8's have; all others are stored transposed."""
    return case["format"].startswith("mxfp8") and "columnwise" in name


def golden_codes(case: dict, arrays: Arrays, name: str, rows: int) -> torch.Tensor:
    """An array of codes as the buffer q of a matrix with that many rows."""
    data = torch.from_numpy(arrays[name])
    return (data.T if is_untransposed(case, name) else data).reshape(rows, -1)


def golden_buffers(case: dict, arrays: Arrays, direction: str, format: Format, rows: int, cols: int) -> dict:
    """Golden arrays of one direction as the format's buffers for the matrix [rows, cols] that is encoded."""
    buffers = {"q": golden_codes(case, arrays, f"{direction}_data", rows)}
    if case["format"] == "fp8_current":
        return buffers | {"s": torch.from_numpy(arrays["scale_inv"]).reshape(1, 1)}
    scale = torch.from_numpy(arrays[f"{direction}_scale"])
    if case["format"] == "fp8_block1d":
        scale = scale[:, :rows].T
    elif case["format"] == "fp8_block2d":
        scale = scale[:, : -(-cols // 128)]
    else:
        scale = scale.T if is_untransposed(case, f"{direction}_scale") else scale
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


def directions(arrays: Arrays) -> list[str]:
    present = [direction for direction in DIRECTIONS if f"{direction}_data" in arrays]
    assert present
    return present


def check_encoded(case: dict, arrays: Arrays, direction: str, got: dict, expected: dict) -> None:
    """Buffers against golden ones, the codes against TransformerEngine's other kernels, too, but for signs of zero, and
    the scales against those in the layout of tensor cores where the vectors have it."""
    format = format_of(case, direction)
    where = f"{direction} {format}"
    assert got.keys() == expected.keys() == format.layout.keys()
    for name in set(expected) - {"q"}:
        assert_same(got[name], expected[name], f"{where}: {name}")
    codes, golden = format.codes(got), [format.codes(expected)]
    others = [name for word in ("specialized", "kernel") if (name := f"{word}_{direction}_data") in arrays]
    golden += [format.codes({"q": golden_codes(case, arrays, name, len(expected["q"]))}) for name in others]
    if "disputed" in case or others:
        codes, *golden = (unsigned_zero(each, format.element_bits) for each in (codes, *golden))
    for each in golden:
        assert_same(codes, each, f"{where}: codes")
    if f"{direction}_scale_swizzled" in arrays:
        scales = got["s"].repeat_interleave(format.tile[0], 0)[: len(codes)]
        assert_same(swizzle(scales), torch.from_numpy(arrays[f"{direction}_scale_swizzled"]), f"{where}: swizzled")


def unsigned_zero(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.where(codes == 1 << (bits - 1), 0, codes)


QUANTIZER_CASES = [case for case in find_cases() if case["format"] in QUANTIZERS]


def _few() -> list[dict]:
    by_format = {}
    for case in QUANTIZER_CASES:
        formats = tuple(str(format_of(case, d)) for d in directions(Arrays(case)))
        by_format.setdefault(formats, []).append(case)
    return [case for cases in by_format.values() for case in cases[:2]]


FEW_QUANTIZER_CASES = _few()
"""The first two of every pair of formats."""
