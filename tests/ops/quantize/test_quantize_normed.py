"""A norm quantized as it is computed: the bytes of quantize() of the norm that norm() makes."""

import pytest
import torch

from hqsweep.ops import norm
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.fused import Normed, quantize_normed
from hqsweep.ops.quantize.kernels import NO_KEY
from hqsweep.ops.quantize.request import request_of

EPSILON = 1e-5
PAIRS = [
    ("mxfp8", "mxfp8", False), ("mxfp8", "", False), ("", "mxfp8+e5m2", False), ("mxfp8", "mxfp8", True),
    ("fp8_block", "fp8_block", False), ("fp8_block+2d", "mxfp8", False), ("mxfp6_e2m3", "mxfp4", False),
]  # fmt: skip


def drawn(rows, cols, centred):
    g = torch.Generator().manual_seed(rows + cols)
    total = (torch.randn(rows, cols, generator=g) * torch.logspace(-2, 2, rows)[:, None] + 0.2).bfloat16().cuda()
    gain = (torch.randn(cols, generator=g) + 1).cuda()
    return total, gain, torch.randn(cols, generator=g).cuda() if centred else None


@pytest.mark.feature("T3")
@pytest.mark.gpu
@pytest.mark.parametrize("exact", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("row", "column", "dequantized"), PAIRS)
def test_bytes_are_those_of_the_norm_quantized(row, column, dequantized, centred, exact):
    for rows, cols in ((128, 128), (256, 768), (384, 2048), (96, 160), (160, 96)):
        total, gain, bias = drawn(rows, cols, centred)
        total[1, 3] = torch.nan
        h, statistics = norm.norm(total, None, gain, bias, EPSILON, torch.bfloat16)
        (alone,) = norm.norm_statistics(total, None, gain, bias, EPSILON)
        assert torch.equal(alone.nan_to_num(), statistics.nan_to_num())
        expected = operators.quantize(h, row, column, dequantized, *exact, NO_KEY, NO_KEY, None, None, False)
        source, outputs = ("original", "rowwise_dequantized")[dequantized], (("codes", "exact")[e] for e in exact)
        request = request_of(row, column, source, *outputs)
        operands = quantize_normed(request, Normed(total, gain, bias, statistics, EPSILON))
        assert [(t.shape, t.dtype) for t in operands] == [(t.shape, t.dtype) for t in expected]
        for a, b in zip(operands, expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
def test_the_statistics_alone_leave_the_sum():
    total, gain, _ = drawn(64, 384, False)
    branch = torch.randn(64, 384).cuda()
    _, statistics, summed = norm.norm(total, branch, gain, None, EPSILON, torch.bfloat16)
    alone = norm.norm_statistics(total, branch, gain, None, EPSILON)
    assert torch.equal(alone[0], statistics) and torch.equal(alone[1], summed)
    arguments = (summed, gain, None, statistics, EPSILON, "mxfp8", "mxfp8", False, [True, False])
    torch.library.opcheck(
        torch.ops.hqsweep.quantize_normed.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    arguments = (total, branch, gain, None, EPSILON)
    torch.library.opcheck(
        torch.ops.hqsweep.norm_statistics.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("total is torch.float32 .*; it takes bfloat16 with two axes", {"total": torch.ones(128, 128)}),
        (r"statistics is torch.float32 \(2, 128\)", {"statistics": torch.ones(2, 128)}),
        ("nvfp4 draws random bits or has a global amax", {"row": "nvfp4"}),
        ("exact is .*; it takes one for rows", {"exact": [True] * 3}),
    ],
)
def test_what_it_cannot_read_is_refused(message, change):
    arguments = {
        "total": torch.ones(128, 128).bfloat16(), "gain": torch.ones(128), "bias": None,
        "statistics": torch.ones(1, 128), "epsilon": EPSILON, "row": "mxfp8", "column": "", "decoded": False,
        "exact": [False, False],
    } | change  # fmt: skip
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.hqsweep.quantize_normed(*(t.cuda() if isinstance(t, torch.Tensor) else t for t in arguments.values()))
