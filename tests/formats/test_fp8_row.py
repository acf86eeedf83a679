"""fp8_row against torchao 0.18: its casts of rows and columns, and all operands of its two rowwise recipes.

tests/golden/torchao_fp8_row.npz has the matrices of hqsweep.formats.inputs, and one linear of each recipe, with the
casts of Float8Linear in the order in which it makes them. torchao differs in rows with a NaN or an inf, tested as such.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import hqsweep as hq
from hqsweep.formats import parse
from hqsweep.formats.inputs import DISTRIBUTIONS
from hqsweep.nn import Linear
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import quantize

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "torchao_fp8_row.npz")
TEXTS, DIRECTIONS = ("fp8_row", "fp8_row+pow2"), ("rowwise", "columnwise")
INPUTS = [f"{dtype}/{name}" for dtype in ("bf16", "fp32") for name in DISTRIBUTIONS]
RECIPES = {"fp8_row": "rowwise", "fp8_row_gw_hp": "rowwise_with_gw_hp"}
CASTS = (("input", "rowwise"), ("weight", "rowwise"), ("grad_output", "rowwise"), ("weight", "columnwise"),
         ("grad_output", "columnwise"), ("input", "columnwise"))  # fmt: skip
"""The operands that Float8Linear casts, in order. With gw_hp it leaves out the last two."""


def load(key: str) -> torch.Tensor:
    x = torch.from_numpy(GOLDEN[key])
    return x.view(torch.bfloat16) if x.dtype == torch.uint16 else x


def theirs(key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's codes, and its scales as the factors that decode."""
    return load(f"{key}_data"), 1.0 / load(f"{key}_scale")


def check(case: str, device: str, backend: str) -> None:
    x = load(f"{case}/input")
    for text in TEXTS:
        ours = quantize(x.to(device), parse(text), parse(text), backend=backend)
        for direction, view in zip(DIRECTIONS, (x, x.t()), strict=True):
            finite = view.isfinite().all(1)
            codes, scales = theirs(f"{case}/{text}/{direction}")
            buffers = getattr(ours, direction)
            got = {name: buffer.cpu() for name, buffer in buffers.items()}
            assert finite.sum() > 20
            assert torch.equal(got["s"][finite], scales[finite])
            assert torch.equal(got["q"][finite], codes[finite])
            values = dequantize(buffers, parse(text), tuple(view.shape), backend=backend).cpu()
            expected = codes.view(torch.float8_e4m3fn).float() * scales
            assert torch.equal(values[finite], expected[finite])


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("case", INPUTS)
def test_rows_and_columns_equal_torchao(case, backend):
    check(case, "cpu", backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", INPUTS)
def test_rows_and_columns_on_a_gpu_equal_torchao(case):
    check(case, "cuda", "kernel")


def test_rows_that_are_not_finite_are_nan_in_torchao_only():
    x = load("fp32/nonfinite/input")
    codes, _ = theirs("fp32/nonfinite/fp8_row/rowwise")
    got = parse("fp8_row").encode(x)
    for row in (~x.isfinite().all(1)).nonzero().flatten().tolist():
        infinite = bool(x[row].isinf().any())
        assert codes[row].view(torch.float8_e4m3fn).float().isnan().any()
        assert (got["q"][row] == 0x7F).sum() == x[row].isnan().sum()
        assert (got["s"][row].item() == 1.0) == infinite


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_operands_of_torchaos(name):
    base, section = f"linear/{RECIPES[name]}", hq.recipe(name).linear
    casts = [key for key in GOLDEN.files if key.startswith(f"{base}/cast") and key.endswith("_data")]
    assert len(casts) == (6 if name == "fp8_row" else 4)
    for number, (tensor, direction) in enumerate(CASTS):
        quantized = getattr(getattr(section, tensor).quantize(load(f"{base}/{tensor}")), direction)
        if number >= len(casts):
            assert str(quantized.format) == "bf16"
            continue
        codes, scales = theirs(f"{base}/cast{number}")
        turned = quantized.buffers["q"].shape != codes.shape or (tensor, direction) == ("weight", "rowwise")
        turned = turned or (direction == "columnwise" and tensor != "weight")
        assert torch.equal(quantized.buffers["q"], codes.t() if turned else codes)
        assert torch.equal(quantized.buffers["s"].flatten(), scales.flatten())


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_computes_torchaos_products(name):
    """torchao emulates them: it multiplies decoded values, rounded to bfloat16."""
    base = f"linear/{RECIPES[name]}"
    layer = Linear(48, 64, bias=False, name="torchao", recipe=name, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(load(f"{base}/weight"))
    x = load(f"{base}/input").requires_grad_()
    y = layer(x)
    y.backward(load(f"{base}/grad_output"))
    for key, got in (("y", y), ("dx", x.grad), ("dw", layer.weight.grad)):
        expected = load(f"{base}/{key}").double()
        assert (got.double() - expected).norm() / expected.norm() < 2.0**-7, key
