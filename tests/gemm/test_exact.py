"""mm_t: the product of exact operands, and where the factors go."""

import pytest
import torch
from cases import NAMES, REPRESENTATIVE

from hqsweep.formats import ExactOperand, RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import matrix_product, mm_t
from hqsweep.gemm.native import gemm_plan
from hqsweep.nn.linears import rows_of
from hqsweep.quant import HybridQuantizer

KEY = RngKey(seed=0, slot="t", step=0)
FORMATS = [text for text in REPRESENTATIVE if not (parse(text).delayed or parse(text).rht)]
MEETING = [(a, FORMATS[(i + distance) % len(FORMATS)]) for i, a in enumerate(FORMATS) for distance in (0, 1, 5, 12)]
"""Each format as either operand, with itself and others."""
WITH_FACTOR = [text for text in FORMATS if text in NAMES and parse(text).amax_name]


def rowwise(text, x):
    return HybridQuantizer.parse(f"{text}|bf16").quantize(x, columnwise=None, key=KEY).rowwise


@pytest.mark.parametrize(("a", "b"), MEETING)
def test_any_two_formats_meet(a, b):
    left, right = (
        rowwise(a, draw("normal", 32, 128)),
        rowwise(b, draw("normal", 48, 128, 1)),
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
    assert str(gemm_plan(parse("mxfp8"), parse("nvfp4"), None)) == "exact: bf16 operands, float32 GEMM"
    assert "bfloat16 tensor cores" in str(gemm_plan(parse("mxfp8"), parse("nvfp4"), (9, 0)))
    for text in ("fp8_block+fp32_scale", "fp16", "fp32"):
        assert str(gemm_plan(parse(text), parse("mxfp8"), (9, 0))) == "exact: fp32 operands, float32 GEMM (TF32 off)"


@pytest.mark.gpu
@pytest.mark.parametrize(("a", "b"), MEETING)
def test_gpu_products_are_those_of_the_exact_operands(a, b):
    """Against float64 on the CPU: float32 accumulation is all that differs."""
    x, w = draw("normal", 256, 1024), draw("normal", 128, 1024, 1)
    left, right = rowwise(a, x.cuda()), rowwise(b, w.cuda())
    expected = left.dequantize(torch.float64).cpu() @ right.dequantize(torch.float64).cpu().t()
    actual = mm_t(left, right, out_dtype=torch.float32).double().cpu()
    assert (actual - expected).norm() / expected.norm() < 2e-6


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("b", WITH_FACTOR)
@pytest.mark.parametrize("a", WITH_FACTOR)
def test_fused_epilogue_has_the_bits_of_separate_passes(a, b, out_dtype):
    """Scalars are multiplied with each other first; factors of rows come after the constant, rows before columns."""
    left, right = (rowwise(t, draw("heavy", 48, 128, i)).operand() for i, t in enumerate((a, b)))
    product = left.matrix.float() @ right.matrix.float().t()
    constant, of_rows = torch.tensor(1.0 / (left.divisor * right.divisor)), [left.factor.numel(), right.factor.numel()]
    if of_rows == [1, 1]:
        expected = product * (left.factor * right.factor.t() * constant)
    elif 1 in of_rows:
        expected = product * constant * (left.factor * right.factor.t())
    else:
        expected = product * constant * left.factor * right.factor.t()
    assert torch.equal(mm_t(left, right, out_dtype=out_dtype), expected.to(out_dtype))


GPU_SHAPES = [(256, 128, 1024), (16, 16, 8192), (1, 64, 4096), (2048, 2048, 512), (512, 4096, 14336), (72, 40, 200)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("formats", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8_current", "mxfp8")], ids="-".join)
def test_gpu_rounding_in_the_gemm_is_one_rounding(formats, shape):
    """bfloat16 written by the GEMM is the rounding of a float32 accumulator, in some order of accumulation.

    The order is the library's (it may pick another kernel for another output type), so the float32 product beside it
    differs in its last bits; where it is further than that from a tie, the bits have to agree.
    """
    m, n, k = shape
    k -= k % 16
    left, right = (rowwise(t, draw("normal", r, k, r).cuda()).operand() for t, r in zip(formats, (m, n), strict=True))
    wide = mm_t(left, right, out_dtype=torch.float32)
    slack = wide.abs().mean() * 1e-5
    low, high = ((wide + d).bfloat16() for d in (-slack, slack))
    actual = mm_t(left, right, out_dtype=torch.bfloat16)
    assert ((low <= actual) & (actual <= high)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 14336, 4096), (8192, 4096, 14336), (14336, 4096, 8192)], ids=str)
def test_gpu_large_gemms_round_the_same_accumulator(shape):
    """The three GEMMs of a large linear: cuBLAS accumulates alike for both output types, so every bit agrees."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(r, k, generator=generator, device="cuda").bfloat16() for r in (m, n))
    rounded = mm_t(ExactOperand(a), ExactOperand(b), out_dtype=torch.bfloat16)
    assert torch.equal(rounded, torch.mm(a, b.t(), out_dtype=torch.float32).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("shape", [(16384, 3072, 2048), (16384, 2048, 2752), (32768, 768, 384), (32768, 2048, 768)])
def test_gpu_rows_of_a_product_are_products_of_rows(format, shape):
    """What hqsweep.parallel.shared.call rests on."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(r, k, generator=generator, device="cuda").bfloat16() for r in (m, n))
    a, b = rowwise(format, a).operand(), rowwise(format, b).operand()
    whole = mm_t(a, b, out_dtype=torch.bfloat16)
    for parts in (2, 8):
        y = torch.full_like(whole, torch.nan)
        for start in range(0, m, m // parts):
            mm_t(rows_of(a, start, start + m // parts), b, out_dtype=y.dtype, out=y[start : start + m // parts])
        assert torch.equal(y, whole), parts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4", "fp8_current", "nvfp4+row_scaled"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_written_to_out_and_nowhere_beside_it(format, out_dtype, device):
    a, b = (rowwise(format, draw("normal", rows, 64, rows).to(device)).operand() for rows in (48, 32))
    y = torch.zeros(64, 32, dtype=out_dtype, device=device)
    written = mm_t(a, b, out_dtype=out_dtype, out=y[8:56])
    assert written.data_ptr() == y[8:].data_ptr()
    assert torch.equal(y[8:56], mm_t(a, b, out_dtype=out_dtype))
    assert not y[:8].any() and not y[56:].any()


@pytest.mark.gpu
def test_gpu_product_leaves_torchs_setting_alone():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    for shape in ((16, 16), (3, 16, 16)):
        a = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        assert matrix_product(a, a, torch.bfloat16).eq(16).all()
        assert matmul.allow_bf16_reduced_precision_reduction == before


BATCHES = [((32, 48), (16, 48)), ((3, 32, 48), (3, 16, 48)), ((1, 5, 7), (1, 9, 7))]


@pytest.mark.parametrize("shapes", BATCHES, ids=str)
def test_products_of_traced_graphs_have_the_shapes_of_real_ones(shapes):
    """The operators of a GPU on tensors without memory, turned operands included."""
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    with torch._subclasses.FakeTensorMode():
        by_rows = [torch.empty(shape, **options) for shape in shapes]
        turned = [torch.empty(*shape[:-2], shape[-1], shape[-2], **options).mT for shape in shapes]
        products = [
            (t, matrix_product(*pair, t)) for t in (torch.bfloat16, torch.float32) for pair in (by_rows, turned)
        ]
    for out_dtype, fake in products:
        real = matrix_product(*(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes), out_dtype)
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        assert fake.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", BATCHES, ids=str)
def test_gpu_products_compile_in_one_graph(shapes):
    torch.compiler.reset()
    a, b = (draw("normal", *shape[-2:], i).expand(shape).cuda() for i, shape in enumerate(shapes))
    compiled = torch.compile(lambda a, b: matrix_product(a * 2, b, torch.bfloat16), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), matrix_product(a * 2, b, torch.bfloat16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_several_products_are_those_of_each_pair(out_dtype, device):
    """Matrices of whole numbers, whose sums no order changes, lie by rows or turned."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-9, 10, (3, rows, 80), generator=generator).bfloat16().to(device) for rows in (24, 40))
    expected = torch.stack([matrix_product(x, y, out_dtype) for x, y in zip(a, b, strict=True)])
    for x in (a, a.mT.contiguous().mT):
        for y in (b, b.mT.contiguous().mT):
            assert torch.equal(matrix_product(x, y, out_dtype), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 128), (33, 70), (1, 8), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_epilogue_is_torchs_product_rounded_once(shape, dtype):
    exact = torch.randn(shape, device="cuda")
    for product in (exact, exact.bfloat16()):
        for factor in (torch.full((1, 1), 0.3), torch.rand(shape[0], 1), torch.rand(shape[1], 1).t()):
            for before in (1.0, 1 / 2688):
                rounded = ((product.float() * before) * factor.cuda()).to(dtype)
                assert torch.equal(torch.ops.hqsweep.scale_product(product, factor.cuda(), dtype, before), rounded)
