"""Every byte of the golden vectors: codes, scales, amaxes and decoded values of all formats, rowwise and columnwise.

The vectors come from TransformerEngine and the CUDA headers; tests/support/golden/golden_cases.py reads them.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from support.golden.golden_cases import (
    COMMITTED,
    DIRECTIONS,
    QUANTIZER_CASES,
    QUANTIZERS,
    ROOT,
    Arrays,
    as_matrix,
    assert_same,
    check_encoded,
    directions,
    find_cases,
    format_of,
    golden_buffers,
)

from hqsweep.formats import Format, parse
from hqsweep.formats.base import FLT_MAX, fp8_scale
from hqsweep.formats.elements import ELEMENTS, e8m0_decode, e8m0_up
from hqsweep.formats.fp8 import end_step
from hqsweep.formats.hadamard import SIGNS
from hqsweep.formats.nvfp4 import stochastic_e2m1
from hqsweep.formats.random import philox
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import quantize

LOW_WORD = 0xFFFFFFFF


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
    operands = quantize(x.to(device), *(formats.get(direction) for direction in DIRECTIONS), backend="kernel")
    for direction, format in formats.items():
        view = x if direction == "rowwise" else x.T
        golden = golden_buffers(case, arrays, direction, format, *view.shape)
        got = {name: buffer.cpu() for name, buffer in getattr(operands, direction).items()}
        check_encoded(case, arrays, direction, got, golden)
        on_device = {name: buffer.contiguous().to(device) for name, buffer in golden.items()}
        decoded = dequantize(on_device, format, tuple(view.shape), backend="kernel")
        check_decoded(case, arrays, direction, decoded.cpu())


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


def halves(number: int) -> tuple[int, int]:
    """The low and the high 32 bits."""
    return number & LOW_WORD, number >> 32


def check_stochastic_rounding(case: dict, arrays: Arrays) -> None:
    bits = torch.from_numpy(arrays["rbits8"].astype(np.uint8))
    for (seed, sequence, offset), words in zip(
        arrays["philox_seed_seq_offset"].tolist(), arrays["philox_u32"], strict=True
    ):
        block = offset + torch.arange(len(words) // 4)
        counter = (block & LOW_WORD, block >> 32, *(torch.full_like(block, word) for word in halves(sequence)))
        drawn = torch.stack(philox(halves(seed), counter), dim=-1).flatten()
        np.testing.assert_array_equal(drawn.numpy(), words, err_msg=f"Philox of {seed}, {sequence}, {offset}")
    codes = stochastic_e2m1(torch.from_numpy(arrays["x"]), bits)
    assert_same(codes, torch.from_numpy(arrays["e2m1_code"]), "codes")
    np.testing.assert_array_equal(ELEMENTS["e2m1"].decode(codes).numpy(), arrays["e2m1_value"])


def check_rht_matrix(case: dict, arrays: Arrays) -> None:
    for name, text in (("matrix_with_sign", "nvfp4+rht"), ("matrix_no_sign", "nvfp4+rht+nosign")):
        assert_same(parse(text).basis(torch.eye(16)), torch.from_numpy(arrays[name]), name)
    assert tuple(arrays["sign_vector"]) == SIGNS[:16]
    assert arrays["sign_mask_u16"].item() == sum(1 << i for i, sign in enumerate(SIGNS[:16]) if sign < 0)


def check_nonfinite(case: dict, arrays: Arrays) -> None:
    quantizers = {key.rsplit("/", 1)[0] for key in arrays.keys if key.endswith("/rowwise_data")}
    assert quantizers
    for prefix in sorted(quantizers):
        source, name = prefix.split("/")
        kind, fp8 = name.split("_")
        fields = {"prefix": prefix, "input_key": f"{source}/input", "fp8": fp8, "pow2": False}
        part = case | fields | {"format": {"mxfp8": "mxfp8", "fp8cs": "fp8_current"}[kind]}
        own = Arrays(part)
        check_quantizer(part, own)
        arrays.read |= own.read


def check_delayed(case: dict, arrays: Arrays) -> None:
    """Each slot of each case, step by step: history and scale after TransformerEngine's fused update."""
    for name, description in json.loads(str(arrays.file["__meta__"]))["cases"].items():
        recorded, scales, histories = (torch.from_numpy(arrays[f"{name}/{k}"]) for k in ("amax", "scale", "history"))
        scaled_max = ELEMENTS[description["fp8"]].max * 2.0 ** -description["margin"]
        for slot in range(recorded.shape[1]):
            history, amax = torch.zeros(description["L"]), torch.zeros(1, 1)
            for step in range(len(recorded)):
                history[0] = recorded[step, slot]
                history, amax = end_step(history, amax, most_recent=description["algo"] == "most_recent")
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


@pytest.mark.feature("F22", "F21", "F23", "F24", "F25", "F26")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case):
    """By the reference, and by the kernel on the CPU; and no array of the case is left unread."""
    arrays = Arrays(case)
    CHECKS[case["format"]](case, arrays)
    assert arrays.unread() == []
    if case["format"] in QUANTIZERS:
        check_kernel(case, arrays, "cpu")


@pytest.mark.parametrize("file", sorted({case["file"] for case in CASES}))
def test_every_array_belongs_to_a_case(file):
    cases = [case for case in CASES if case["file"] == file]
    inputs = {case["input_key"] for case in cases if "input_key" in case} | {"__meta__"}
    prefixes = tuple(f"{case['prefix']}/" if case["prefix"] else "" for case in cases)
    assert {key for key in Arrays(cases[0]).keys if not key.startswith(prefixes)} <= inputs


def test_every_file_has_cases():
    files = {path.relative_to(ROOT).as_posix() for pattern in ("*.npz", "te_*") for path in ROOT.rglob(pattern)}
    of_torchao = {"torchao_mx.npz", "torchao_mx_ceil.npz", "torchao_fp8_row.npz"}  # test_mx_scales.py, test_fp8_row.py
    assert files - of_torchao == {case["file"] for case in CASES}


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
