"""gemm=native: what tensor cores take, the operands as they take them, and on a GPU the product itself."""

from dataclasses import replace

import pytest
import torch
from cases import EVERY_OPTION

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand, parse
from hqsweep.formats.base import expand_tiles
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.native import _ARRANGED, _aligned, fault, mm_t_native, plan_text, shape_fault, swizzle
from hqsweep.quant import HybridQuantizer

HOPPER, BLACKWELL = (9, 0), (10, 0)
PAIRS = [
    ("fp8_current", "fp8_current"),
    ("fp8_current+e5m2", "fp8_current"),
    ("fp8_current", "fp8_current+e5m2"),
    ("fp8_block", "fp8_block"),
    ("fp8_block", "fp8_block+2d"),
    ("fp8_block+2d", "fp8_block"),
    ("fp8_block+e5m2", "fp8_block+2d"),
    ("fp8_block+fp32_scale", "fp8_block+fp32_scale+2d"),
    ("fp8_row", "fp8_row"),
    ("fp8_row+pow2", "fp8_row"),
    ("fp8_row", "fp8_current"),
    ("fp8_current+pow2", "fp8_row"),
    ("bf16", "bf16"),
]


def operand(text, rows, cols, seed=0, device="cpu"):
    x = draw("normal", rows, cols, seed).to(device)
    return HybridQuantizer.parse(f"{text}|bf16").quantize(x, columnwise=None).rowwise


def unswizzle(flat, rows, blocks):
    """The documented offset of every entry, one by one."""
    across = -(-blocks // 4)
    out = torch.empty(rows, blocks, dtype=flat.dtype)
    for i in range(rows):
        for j in range(blocks):
            tile = (i // 128) * across + j // 4
            out[i, j] = flat[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4]
    return out


@pytest.mark.parametrize("rows, blocks", [(128, 4), (1, 1), (130, 5), (256, 12), (300, 3)])
def test_swizzle_puts_every_scale_where_the_hardware_reads_it(rows, blocks):
    scales = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = swizzle(scales)
    assert flat.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    assert torch.equal(unswizzle(flat, rows, blocks), scales)
    assert int(flat.count_nonzero()) == rows * blocks  # the padding is 0


@pytest.mark.parametrize(
    "text",
    [t for t in EVERY_OPTION if parse(t).name in ("mxfp8", "nvfp4") and not (parse(t).rht or parse(t).stochastic)],
)
def test_operands_with_block_scales_decode_to_the_exact_matrix(text):
    quantized = operand(text, 144, 288)
    codes, scales = _ARRANGED[quantized.format.scaling](quantized)
    blocks = 288 // quantized.format.tile[1]
    plain = unswizzle(scales.view(torch.uint8), 144, blocks).view(scales.dtype)
    matrix = quantized.format.element.decode(quantized.format.codes({"q": codes.view(torch.uint8)}))
    exact = quantized.operand().matrix
    assert torch.equal(
        (matrix * expand_tiles(plain.float(), (144, 288), 1, quantized.format.tile[1])).bfloat16(), exact
    )


@pytest.mark.parametrize("columns, stride", [(128, 4), (384, 4), (704, 8)])
def test_rows_of_tiles_lie_a_multiple_of_16_bytes_apart(columns, stride):
    """For any number of tiles in a row, with their scales unchanged; tiles of a row run fastest."""
    quantized = operand("fp8_block+2d", 272, columns)
    _, scales = _ARRANGED["block"](quantized)
    own = quantized.buffers["s"]
    assert scales.shape == (stride, 3) and scales.stride() == (1, stride)
    assert torch.equal(scales.t()[:, : own.shape[1]], own)
    whole = operand("fp8_block+2d", 272, 512)
    assert _ARRANGED["block"](whole)[1] is whole.buffers["s"]


def test_scales_of_experts_have_addresses_that_cublas_takes():
    """Each has one of an array of float32, of which every fourth lies at a multiple of 16 bytes."""
    whole = operand("fp8_current", 16, 32)
    scales = torch.arange(8, dtype=torch.float32)
    for expert in range(8):
        own = replace(whole, buffers=whole.buffers | {"s": scales[expert : expert + 1]})
        scale = _aligned(_ARRANGED["tensor"](own)[1])
        assert scale.data_ptr() % 16 == 0 and scale.dim() == 0 and scale.item() == expert


@pytest.mark.parametrize("a, b", [*PAIRS, ("fp8_delayed", "fp8_delayed+e5m2"), ("fp8_current", "fp8_delayed")])
def test_hopper_takes(a, b):
    assert fault(parse(a), parse(b), HOPPER) is None


@pytest.mark.parametrize(
    "a, b, capability, words",
    [
        ("fp8_current", "fp8_current", None, "8.9 or later"),
        ("fp8_current", "fp8_current", (8, 0), "8.9 or later"),
        ("fp8_block", "fp8_block", (8, 9), "sm_89 has no product for fp8_block; it has: fp8_current, fp8_delayed"),
        ("mxfp8", "mxfp8", HOPPER, "sm_90 has no product for mxfp8; it has: fp8_block, fp8_current"),
        ("fp8_current", "nvfp4", HOPPER, "sm_90 has no product for nvfp4"),
        ("fp8_current", "fp8_block", HOPPER, "scaling modes differ"),
        ("fp8_block+2d", "fp8_block+2d", HOPPER, "128x128 tiles on both sides"),
        ("fp8_current+e5m2", "fp8_current+e5m2", HOPPER, "E5M2 does not meet E5M2"),
        ("fp8_delayed+e5m2", "fp8_current+e5m2", HOPPER, "E5M2 does not meet E5M2"),
        ("bf16", "fp8_current", HOPPER, "one high-precision dtype"),
        ("fp8_block", "fp8_block", BLACKWELL, "fp8_block; it has: fp8_current, fp8_delayed, fp8_row, mxfp8, nvfp4"),
        ("fp8_row", "fp8_block", HOPPER, "scaling modes differ"),
        ("fp8_row", "fp8_row", (8, 9), "sm_89 has no product for fp8_row; it has: fp8_current, fp8_delayed"),
        ("mxfp6_e2m3", "mxfp6_e2m3", BLACKWELL, "sm_100 has no product for mxfp6_e2m3"),
        ("nvfp4", "mxfp8", BLACKWELL, "scaling modes differ"),
        ("mxfp8", "mxfp8", (7, 0), "8.9 or later"),
    ],
)
def test_refusals_say_what_there_is(a, b, capability, words):
    assert words in fault(parse(a), parse(b), capability)


def test_untried_hardware_is_named():
    assert fault(parse("nvfp4"), parse("nvfp4+rht"), BLACKWELL) is None
    assert "not yet run" in plan_text(BLACKWELL)
    assert "not yet run" not in plan_text(HOPPER)


@pytest.mark.parametrize(
    "a, b, shape, words",
    [
        ("fp8_current", "fp8_current", (3, 32, 48), None),
        ("fp8_current", "fp8_current", (16, 24, 48), "rows of the second operand (24)"),
        ("fp8_current", "fp8_current", (16, 16, 40), "the contracted axis (40)"),
        ("fp8_block", "fp8_block", (17, 16, 128), "rows of the first operand (17)"),
        ("fp8_block", "fp8_block+2d", (16, 16, 640), None),
        ("fp8_block+e5m2", "fp8_block+2d", (16, 16, 512), None),
        ("fp8_block+e5m2", "fp8_block+2d", (16, 16, 640), "beside E5M2 tensor cores take a multiple of 4 tiles"),
        ("bf16", "bf16", (3, 5, 7), None),
    ],
)
def test_shapes(a, b, shape, words):
    fault_said = shape_fault(parse(a), parse(b), *shape)
    assert fault_said is None if words is None else words in fault_said


def test_nothing_falls_back():
    a, b = operand("fp8_current", 16, 32), operand("fp8_current", 16, 32, 1)
    with pytest.raises(UserError, match="fp8_current x fp8_current: gemm=native needs a GPU"):
        mm_t_native(a, b, out_dtype=torch.bfloat16)


def test_high_precision_is_the_same_product():
    a, b = operand("bf16", 16, 32), operand("bf16", 24, 32, 1)
    assert torch.equal(mm_t_native(a, b, out_dtype=torch.float32), mm_t(a, b, out_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(256, 272, 512), (512, 384, 1024), (64, 128, 1536), (256, 144, 384), (128, 704, 704), (64, 144, 496)]
)
@pytest.mark.parametrize("a, b", PAIRS)
def test_products_of_the_tensor_cores(a, b, shape):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the table of sm_90")
    m, n, k = shape
    if shape_fault(parse(a), parse(b), m, n, k):
        pytest.skip("refused, see test_shapes")
    left, right = operand(a, m, k, device="cuda"), operand(b, n, k, 1, device="cuda")
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64).t()
    for dtype, bound in ((torch.float32, 5e-4), (torch.bfloat16, 5e-3)):
        product = mm_t_native(left, right, out_dtype=dtype)
        error = (product.double() - exact).norm() / exact.norm()
        assert product.dtype == dtype
        assert error < bound, f"{error:.2e}"


@pytest.mark.gpu
def test_sums_that_every_accumulator_holds_are_equal():
    """Codes of small integers under scales of 1: 64 products of at most 64 fit the tensor core's accumulator."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the table of sm_90")
    x, y = (
        torch.randint(-8, 9, (64, 64), generator=torch.Generator().manual_seed(s)).bfloat16().cuda() for s in (0, 1)
    )
    x[0, 0] = y[0, 0] = 448.0  # the scale becomes 1
    row = HybridQuantizer.parse("fp8_current|bf16")
    a, b = (row.quantize(t, columnwise=None).rowwise for t in (x, y))
    exact: list[ExactOperand] = [o.operand() for o in (a, b)]
    assert torch.equal(exact[0].matrix, x)
    native = mm_t_native(a, b, out_dtype=torch.float32)
    assert torch.equal(native[1:, 1:], mm_t(*exact, out_dtype=torch.float32)[1:, 1:])
