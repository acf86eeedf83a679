"""mm_t: the product of exact operands, and where the factors go."""

import pytest
import torch

from hqsweep.formats import ExactOperand, RngKey, parse
from hqsweep.gemm import mm_t, plan
from hqsweep.jobs.inputs import draw
from hqsweep.quant import HybridQuantizer

KEY = RngKey(seed=0, slot="t", step=0)
FORMATS = [
    "bf16",
    "fp16",
    "fp32",
    "fp8_current",
    "fp8_block",
    "fp8_block+fp32_scale",
    "mxfp8",
    "mxfp6_e2m3",
    "mxfp4",
    "nvfp4",
]


def rowwise(text, x):
    return HybridQuantizer.parse(f"{text}|bf16").quantize(x, columnwise=None, key=KEY).rowwise


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", [*FORMATS, "nvfp4+row_scaled", "nvfp4+4over6"])
def test_any_two_formats_meet(a, b):
    left, right = (
        rowwise(a, draw("normal", 32, 128)),
        HybridQuantizer.parse(b).quantize(draw("normal", 48, 128, 1)).rowwise,
    )
    expected = left.dequantize(torch.float64) @ right.dequantize(torch.float64).t()
    torch.testing.assert_close(mm_t(left, right, out_dtype=torch.float32).double(), expected, rtol=2e-6, atol=2e-5)


def test_nvfp4_alpha_is_formed_in_transformer_engines_order():
    ones = torch.ones(1, 1)
    a, b = torch.tensor([[3.7]]), torch.tensor([[0.013]])
    out = mm_t(ExactOperand(ones, a, 2688.0), ExactOperand(ones, b, 1536.0), out_dtype=torch.float32)
    assert out.item() == ((a * b) * torch.tensor(1 / (36 * 448 * 256))).item()


def test_row_factors_apply_to_rows_and_columns():
    m = torch.ones(2, 1)
    rows, columns = torch.tensor([[2.0], [3.0]]), torch.tensor([[5.0], [7.0]])
    assert mm_t(ExactOperand(m, rows), ExactOperand(m, columns), out_dtype=torch.float32).tolist() == [
        [10, 14],
        [15, 21],
    ]
    scalar = torch.tensor([[4.0]])
    assert mm_t(ExactOperand(m, rows), ExactOperand(m, scalar), out_dtype=torch.float32).tolist() == [[8, 8], [12, 12]]
    assert mm_t(ExactOperand(m, None), ExactOperand(m, columns), out_dtype=torch.float32).tolist() == [[5, 7], [5, 7]]


def test_output_is_rounded_once():
    a, b = ExactOperand(torch.full((1, 2), 1.0)), ExactOperand(torch.tensor([[1.0, 2.0**-9]]))
    assert mm_t(a, b, out_dtype=torch.bfloat16).item() == 1.0
    assert mm_t(a, b, out_dtype=torch.float32).item() == 1.0 + 2.0**-9


def test_plans_say_what_runs():
    assert str(plan(parse("mxfp8"), parse("nvfp4"), "cpu")) == "exact: bf16 operands, float32 GEMM"
    assert "bfloat16 tensor cores" in str(plan(parse("mxfp8"), parse("nvfp4"), "cuda"))
    for text in ("fp8_block+fp32_scale", "fp16", "fp32"):
        assert str(plan(parse(text), parse("mxfp8"), "cuda")) == "exact: fp32 operands, float32 GEMM (TF32 off)"


@pytest.mark.gpu
@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", [*FORMATS, "nvfp4+row_scaled"])
def test_gpu_products_are_those_of_the_exact_operands(a, b):
    """Against float64 on the CPU: float32 accumulation is all that differs."""
    x, w = draw("normal", 256, 1024), draw("normal", 128, 1024, 1)
    left, right = rowwise(a, x.cuda()), rowwise(b, w.cuda())
    expected = left.dequantize(torch.float64).cpu() @ right.dequantize(torch.float64).cpu().t()
    actual = mm_t(left, right, out_dtype=torch.float32).double().cpu()
    assert (actual - expected).norm() / expected.norm() < 2e-6
