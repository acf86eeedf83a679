"""GEMMs over experts: the loop is mm_t for each; torch._grouped_mm computes the same products, and torch.bmm those of
experts of equal size.
"""

from dataclasses import replace

import pytest
import torch
from cases import BASES, PRODUCTS

from hqsweep.formats import ExactOperand, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.grouped import (
    Members,
    mm_t_tokens,
    mm_t_weights,
    tokens_by_kernel,
    weights_by_kernel,
)
from hqsweep.gemm.native import GroupGemm, capability_of, gemm_plan
from hqsweep.ops.splits import Splits
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.group import quantize_group

SPLITS = (40, 0, 24, 64)
E, M, N, K = len(SPLITS), sum(SPLITS), 48, 64
LOOP = gemm_plan(parse("mxfp8"), parse("mxfp8"), None, group=GroupGemm())
PAIRS = [
    *((text, text) for text in PRODUCTS if not parse(text).delayed),
    ("nvfp4+row_scaled|mxfp8", "nvfp4|mxfp8"), ("nvfp4+row_scaled|mxfp8", "nvfp4+row_scaled|mxfp8"),
    ("mxfp8", "nvfp4+row_scaled|mxfp8"), ("fp8_block", "fp8_current"), ("fp8_block+fp32_scale", "mxfp8"),
]  # fmt: skip
MULTIPLE_OF_16 = (48, 0, 16, 64)
EQUAL = (M // E,) * E
both_kernels = pytest.mark.parametrize("sizes", [MULTIPLE_OF_16, EQUAL], ids=["ragged", "equal"])


def inputs():
    """x [M, K], w [E * N, K] and dy [M, N]; experts are of different sizes, so that their factors differ."""
    loud = torch.tensor([1.0, 8.0, 0.25, 2.0], dtype=torch.bfloat16)
    x = draw("normal", M, K) * loud.repeat_interleave(torch.tensor(MULTIPLE_OF_16))[:, None]
    return x, draw("normal", E * N, K, 2) * loud.repeat_interleave(N)[:, None], draw("normal", M, N, 1)


def operands(a, b, gemm, device="cpu", sizes=MULTIPLE_OF_16, tensors=None):
    """Operands of x [M, K] and w [E, N, K], dy [M, N] and w, or dy and x; of equal splits as kernels take them."""
    splits, experts, (x, w, dy) = Splits.of(sizes, M), Splits.uniform(E, N), tensors or inputs()

    def quantized(tensor, splits, text):
        exact = {"rowwise": "exact", "columnwise": "exact", "by_rows": sizes == EQUAL}
        return quantize_group(tensor.to(device), splits, HybridQuantizer.parse(text), **exact)

    if gemm == "fprop":
        return quantized(x, splits, a).rowwise, quantized(w, experts, b).rowwise
    if gemm == "dgrad":
        return quantized(dy, splits, a).rowwise, quantized(w, experts, b).columnwise
    return quantized(dy, splits, a).columnwise, quantized(x, splits, b).columnwise


def reference(a, b, out_dtype):
    return [mm_t(x, y, out_dtype=out_dtype) for x, y in zip(a.members, b.members, strict=True)]


def close(a, b, rtol):
    torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=rtol * float(b.float().abs().max()))


@pytest.mark.feature("F141", "T18")
@both_kernels
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_tokens_on_float32_matrices(pair, gemm, sizes):
    """torch's grouped product on a CPU takes float32: the packing, the splits and the factors, to rounding."""
    a, b = operands(*pair, gemm, sizes=sizes)
    a, b = (_float(group) for group in (a, b))
    loop = mm_t_tokens(a, b, LOOP, out_dtype=torch.float32)
    assert torch.equal(loop, torch.cat(reference(a, b, torch.float32)))
    close(tokens_by_kernel(a, b, torch.float32, equal=sizes == EQUAL), loop, 1e-5)


@both_kernels
@pytest.mark.parametrize("pair", [p for p in PAIRS if "row_scaled" not in "".join(p)], ids="-".join)
def test_weights_on_float32_matrices(pair, sizes):
    a, b = (_float(group) for group in operands(*pair, "wgrad", sizes=sizes))
    loop = mm_t_weights(a, b, LOOP, out_dtype=torch.float32)
    assert all(map(torch.equal, loop, reference(a, b, torch.float32)))
    product = weights_by_kernel(a, b, torch.float32, equal=sizes == EQUAL)
    assert product.shape == (E, N, K) and product[1].any() == (sizes[1] > 0)
    for own, expected in zip(product, loop, strict=True):
        close(own, expected, 1e-5)


def _float(group):
    """The same with float32 matrices, as identities in bfloat16 have none on a CPU."""
    return replace(group, matrix=group.matrix.float())


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("text", BASES)
@both_kernels
def test_bfloat16_matrices_lose_one_rounding_at_most(gemm, text, sizes):
    """On a GPU the product is stored in bfloat16, then factors follow, and another rounding; so it is here."""
    a, b = operands(text, text, gemm, sizes=sizes)
    rounded = [replace(group, matrix=group.matrix.bfloat16()) for group in (a, b)]
    product = weights_by_kernel if gemm == "wgrad" else tokens_by_kernel
    expected = reference(a, b, torch.float32)
    result = product(*rounded, torch.bfloat16, equal=sizes == EQUAL)
    assert result.dtype == torch.bfloat16
    close(result, torch.stack(expected) if gemm == "wgrad" else torch.cat(expected), 2**-7)


def whole_numbers(largest):
    """x, w and dy of whole numbers, each with a 7 in every expert: scales are exact, and sums in any order."""
    tensors = []
    for seed, (rows, cols) in enumerate(((M, K), (E * N, K), (M, N))):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randint(-largest, largest + 1, (rows, cols), generator=generator).bfloat16()
        tensor.view(E, -1)[:, 5 + seed] = 7.0
        tensors.append(tensor)
    return tensors


@pytest.mark.feature("H31")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("pair", "largest", "out_dtypes"),
    [
        (("bf16", "bf16"), 7, (torch.bfloat16, torch.float32, torch.float16)),
        (("mxfp8", "mxfp8"), 7, (torch.bfloat16, torch.float32)),
        (("fp8_block", "mxfp8"), 7, (torch.bfloat16, torch.float32)),
        (("fp8_current", "fp8_current"), 1, (torch.bfloat16, torch.float32)),  # sums are whole in bfloat16, too
        (("nvfp4", "nvfp4"), 7, (torch.float32,)),
        (("nvfp4+row_scaled|mxfp8", "nvfp4|mxfp8"), 7, (torch.float32,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_equal_experts_have_the_bytes_of_the_loop(pair, largest, out_dtypes, gemm, device):
    """Where the order of sums does not matter torch.bmm changes no bit, factors of float32 results included."""
    a, b = operands(*pair, gemm, device, EQUAL, whole_numbers(largest))
    for out_dtype in out_dtypes:
        group = GroupGemm(out_dtype=out_dtype, equal_splits=True)
        plan = gemm_plan(a_format(pair, gemm), b_format(pair, gemm), (9, 0), group=group)
        assert plan.kernel == "torch.bmm"
        expected = reference(a, b, out_dtype)
        if gemm == "wgrad":
            product = mm_t_weights(a, b, plan, out_dtype=out_dtype)
        else:
            product = mm_t_tokens(a, b, plan, out_dtype=out_dtype).split(EQUAL)
        for own, single in zip(product, expected, strict=True):
            assert own.dtype == out_dtype and own.any() and torch.equal(own, single)


def a_format(pair, gemm):
    quantizer = HybridQuantizer.parse(pair[0])
    return quantizer.columnwise if gemm == "wgrad" else quantizer.rowwise


def b_format(pair, gemm):
    quantizer = HybridQuantizer.parse(pair[1])
    return quantizer.rowwise if gemm == "fprop" else quantizer.columnwise


def test_members_of_their_own_memory_are_put_together():
    """Operands that are held as codes, each by itself, as weights under quantized_model_init are."""
    splits, quantizer = Splits.of(MULTIPLE_OF_16, M), HybridQuantizer.parse("nvfp4|mxfp8")
    x, w = draw("normal", M, K), draw("normal", E * N, K, 2)
    a = quantize_group(x, splits, quantizer, rowwise="exact", columnwise=None).rowwise
    packed = quantize_group(w, Splits.uniform(E, N), quantizer, rowwise="exact", columnwise=None).rowwise
    own = Members(members=[quantizer.quantize(part).rowwise for part in w.split(N)])
    assert torch.equal(
        mm_t_tokens(a, own, LOOP, out_dtype=torch.bfloat16), mm_t_tokens(a, packed, LOOP, out_dtype=torch.bfloat16)
    )
    grouped = grouped_plan_of_a_gpu("nvfp4", "nvfp4")
    close(mm_t_tokens(a, own, grouped, out_dtype=torch.float32), tokens_by_kernel(a, packed, torch.float32), 1e-6)


def grouped_plan_of_a_gpu(a, b, capability=(9, 0), mode="exact", **known):
    return gemm_plan(parse(a), parse(b), capability, mode, GroupGemm(**known))


@pytest.mark.feature("H31")
def test_plans_say_what_they_are():
    loop = "exact: bf16 operands, bfloat16 tensor cores, float32 accumulation, for each expert"
    kernel = "exact: bf16 operands, torch._grouped_mm, float32 accumulation, stored in bfloat16"
    scaled = f"{kernel} before the factors of experts"
    batched = "exact: bf16 operands, torch.bmm over experts of equal size, float32 accumulation"
    scaled_batch = f"{batched}, stored in bfloat16 before the factors of experts"
    equal, wide = {"equal_splits": True}, {"out_dtype": torch.float32}
    for expected, a, b, options in (
        (kernel, "mxfp8", "mxfp8", {}),
        (kernel, "bf16", "fp8_block", {}),
        (scaled, "fp8_current", "mxfp8", {}),
        (scaled, "mxfp8", "nvfp4+row_scaled", {}),
        (loop, "mxfp8", "mxfp8", {"out_dtype": torch.float32}),
        (kernel, "mxfp8", "mxfp8", {"out_dtype": torch.float32, "host_splits": False}),
        (loop, "mxfp8", "mxfp8", {"sizes": (64, 36)}),
        (loop, "mxfp8", "mxfp8", {"capability": (8, 0)}),
        (batched, "mxfp8", "mxfp8", equal),
        (batched, "mxfp8", "mxfp8", equal | wide),
        (batched, "mxfp8", "mxfp8", equal | {"capability": (8, 0), "sizes": (64, 36)}),
        (scaled_batch, "fp8_current", "mxfp8", equal),
        (batched, "fp8_current", "mxfp8", equal | wide),
        ("exact: fp32 operands, float32 GEMM (TF32 off), for each expert", "fp32", "mxfp8", equal),
        ("exact: fp32 operands, float32 GEMM (TF32 off), for each expert", "fp8_block+fp32_scale", "mxfp8", {}),
    ):
        plan = grouped_plan_of_a_gpu(a, b, **options)
        assert str(plan) == expected and plan.one_kernel == ("torch." in expected)
    of_a_cpu = grouped_plan_of_a_gpu("mxfp8", "mxfp8", None, equal_splits=True)
    assert of_a_cpu.kernel is None and str(of_a_cpu) == str(LOOP)
    assert str(LOOP) == "exact: bf16 operands, float32 GEMM, for each expert" and not LOOP.one_kernel


def test_native_plans_say_what_they_are():
    loop = "native: tensor cores of sm_90 through torch._scaled_mm, for each expert"
    kernel = "native: tensor cores of sm_90 through torch._scaled_grouped_mm, scales of experts as those of rows"
    exact = "exact: bf16 operands, torch._grouped_mm, float32 accumulation, stored in bfloat16"
    for expected, a, b, options in (
        (kernel, "fp8_current", "fp8_delayed", {}),
        (loop, "fp8_current+e5m2", "fp8_current", {}),
        (loop, "fp8_block", "fp8_block+2d", {}),
        (loop, "fp8_current", "fp8_current", {"gemm": "wgrad"}),
        (kernel, "fp8_current", "fp8_current", {"equal_splits": True}),
        (loop, "fp8_current", "fp8_current", {"gemm": "wgrad", "equal_splits": True}),
        (loop, "fp8_current", "fp8_current", {"out_dtype": torch.float32}),
        (loop, "fp8_current", "fp8_current", {"sizes": (64, 40)}),
        (kernel, "fp8_current", "fp8_current", {"host_splits": False}),
        (f"{exact} before the factors of experts", "fp8_current+e5m2", "fp8_current", {"host_splits": False}),
        (exact, "fp8_block", "fp8_block+2d", {"gemm": "wgrad", "host_splits": False}),
    ):
        assert str(grouped_plan_of_a_gpu(a, b, mode="native", **options)) == expected


@pytest.mark.feature("H31")
@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@both_kernels
def test_products_of_a_gpu(pair, gemm, sizes):
    """The plan that is chosen there, in both output types, against float32 products of a CPU."""
    if gemm == "wgrad" and "row_scaled" in "".join(pair):
        pytest.skip("a weight gradient has no rows with factors")
    a, b = operands(*pair, gemm, "cuda", sizes)
    expected = reference(*operands(*pair, gemm, sizes=sizes), torch.float32)
    formats = (a_format(pair, gemm), b_format(pair, gemm))
    for out_dtype in (torch.bfloat16, torch.float32):
        group = GroupGemm(gemm=gemm, out_dtype=out_dtype, sizes=(K, N), equal_splits=sizes == EQUAL)
        plan = gemm_plan(*formats, capability_of("cuda"), group=group)
        product = mm_t_weights if gemm == "wgrad" else mm_t_tokens
        result = product(a, b, plan, out_dtype=out_dtype)
        result = torch.stack(list(result)) if gemm == "wgrad" else result
        assert result.dtype == out_dtype
        rounded = out_dtype == torch.bfloat16 or plan.kernel == "torch._grouped_mm"
        close(
            result.cpu(), torch.stack(expected) if gemm == "wgrad" else torch.cat(expected), 2**-7 if rounded else 1e-5
        )


@pytest.mark.gpu
def test_splits_of_a_device_are_multiplied_without_a_wait():
    """Exact operands that are packed by rows ask nothing of the host."""
    sizes = torch.tensor(MULTIPLE_OF_16, device="cuda")
    x, w = draw("normal", M, K).cuda(), draw("normal", E * N, K, 2).cuda()
    host = quantize_group(x, Splits.of(MULTIPLE_OF_16, M), HybridQuantizer.parse("bf16"), rowwise="exact").rowwise
    experts = quantize_group(w, Splits.uniform(E, N), HybridQuantizer.parse("bf16"), rowwise="exact").rowwise
    layout = type(host.layout)(splits=Splits.of(sizes, M), width=K, columnwise=False)
    on_device = replace(host, layout=layout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product = tokens_by_kernel(on_device, experts, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(product, tokens_by_kernel(host, experts, torch.bfloat16))


def test_an_expert_without_tokens_has_a_zero_gradient():
    a, b = operands("mxfp8", "mxfp8", "wgrad")
    assert a.members[1].matrix.shape == (N, 0) and isinstance(a.members[1], ExactOperand)
    assert not mm_t_weights(a, b, LOOP, out_dtype=torch.float32)[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", ["fp8_current", "fp8_current+e5m2"])
def test_native_products_of_a_gpu(text, gemm):
    """One kernel on codes (E5M2: a product for each expert), against exact products of the same codes on a CPU."""
    codes = {"rowwise": "codes", "columnwise": "codes"}
    a, b = (group.members for group in operands(text, "fp8_current", gemm))
    expected = torch.cat([mm_t(x, w, out_dtype=torch.float32) for x, w in zip(a, b, strict=True)])
    quantizer, splits = HybridQuantizer.parse("fp8_current"), Splits.of(MULTIPLE_OF_16, M)
    x, w = inputs()[:2] if gemm == "fprop" else (inputs()[2], inputs()[1])
    left = quantize_group(x.cuda(), splits, HybridQuantizer.parse(text), **codes).rowwise
    right = quantize_group(w.cuda(), Splits.uniform(E, N), quantizer, **codes)
    right = right.rowwise if gemm == "fprop" else right.columnwise
    if capability_of("cuda") != (9, 0):
        pytest.skip("torch._scaled_grouped_mm is for sm_90")
    plan = grouped_plan_of_a_gpu(text, "fp8_current", capability_of("cuda"), mode="native", sizes=(K, N))
    assert plan.one_kernel == (text == "fp8_current")
    close(mm_t_tokens(left, right, plan, out_dtype=torch.bfloat16).cpu(), expected, 2**-6)


@pytest.mark.feature("H28")
def test_torch_stores_bfloat16_only():
    """Were float32 to be had of torch._grouped_mm, gradients of float32 weights would have to take it."""
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        torch._grouped_mm(a, b, offs=torch.tensor([8, 16], dtype=torch.int32), out_dtype=torch.float32)
