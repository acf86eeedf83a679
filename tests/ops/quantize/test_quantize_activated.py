"""An activation that is quantized from what it is computed of: the bytes of making it and quantizing it."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hqsweep.ops.elementwise import INPUTS, activation, activation_backward
from hqsweep.ops.quantize import fused as module
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.fused import quantize_activated, takes_formats
from hqsweep.ops.quantize.kernels import NO_KEY
from hqsweep.ops.quantize.request import request_of

gpu = pytest.mark.gpu
PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", ""),
    ("", "mxfp8+e5m2"),
    ("mxfp4", "mxfp8"),
    ("mxfp6_e2m3", "mxfp6_e3m2"),
    ("fp8_block", "fp8_block"),
    ("fp8_block+2d", "fp8_block"),
    ("mxfp8+floor", "mxfp8"),
    ("fp8_block+fp32_scale", "mxfp8"),
]
OUTPUTS = [("codes", "codes"), ("exact", "codes"), ("exact", "exact")]


def matrices(kind, rows, width, seed=0):
    """z with a NaN, an infinity and blocks of zeros, and dh."""
    generator = torch.Generator("cuda").manual_seed(seed)
    z = torch.randn(rows, INPUTS[kind] * width, generator=generator, device="cuda")
    z *= torch.exp2(torch.randint(-20, 9, (rows, 1), generator=generator, device="cuda"))
    z[:, :64] = 0
    z[-1, -3], z[rows // 2, 70 % width] = float("nan"), float("inf")
    dh = torch.randn(rows, width, generator=generator, device="cuda")
    return z.bfloat16(), dh.bfloat16()


def in_two(request, z, dh, kind):
    (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
    options = (request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact)
    return operators.quantize(x, *options, NO_KEY, NO_KEY, None, None, False)


def assert_same_bytes(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.feature("T3")
@gpu
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (640, 1024), (96, 64), (160, 192), (256, 352), (128, 80)])
@pytest.mark.parametrize("pair", PAIRS, ids="|".join)
@pytest.mark.parametrize("kind", INPUTS)
def test_bytes_are_those_of_two_passes(kind, pair, shape):
    """Whole tiles, tiles that end early, and shapes that no kernel takes at once."""
    z, dh = matrices(kind, *shape)
    sources = ["original", "rowwise_dequantized"] if all(pair) else ["original"]
    for row, column in OUTPUTS:
        for source in sources:
            request = request_of(*pair, source, row, column)
            for gradient in (None, dh):
                once = quantize_activated(request, z, gradient, kind)
                assert_same_bytes(once, in_two(request, z, gradient, kind))


@gpu
@pytest.mark.parametrize("shape", [(256, 384), (160, 352)])
@pytest.mark.parametrize("pair", PAIRS[:5], ids="|".join)
@pytest.mark.parametrize("kind", INPUTS)
def test_one_pass_is_what_they_take(kind, pair, shape, monkeypatch):
    z, dh = matrices(kind, *shape)
    monkeypatch.setattr(module, "activation", None)
    monkeypatch.setattr(module, "activation_backward", None)
    request = request_of(*pair, "original", "exact", "codes")
    first = [quantize_activated(request, z, gradient, kind) for gradient in (None, dh)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [quantize_activated(request, z, gradient, kind) for gradient in (None, dh)]
    graph.replay()
    for one, other in zip(first, captured, strict=True):
        assert_same_bytes(one, other)


def test_which_formats_it_takes():
    taken = {
        pair: takes_formats(request_of(*pair, "original", "codes", "codes"))
        for pair in [("mxfp8", "fp8_block"), ("mxfp4", ""), ("mxfp8", "nvfp4"), ("fp8_current", ""), ("mxfp8", "bf16")]
    }
    assert list(taken.values()) == [True, True, False, False, False]


@pytest.mark.parametrize("text", ["nvfp4+sr", "fp8_current", "fp8_delayed"])
def test_other_formats_are_refused(text):
    request = request_of(text, "", "original", "codes", "codes")
    with pytest.raises(ValueError, match="draws random bits or has a global amax"):
        quantize_activated(request, torch.zeros(32, 32, dtype=torch.bfloat16), None, "gelu")


def test_outputs_are_said_of_both_directions():
    z = torch.zeros(32, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"exact is \[True\]; it takes one for rows and one for columns"):
        module._activated(z, None, "gelu", "mxfp8", "", False, [True])


def test_a_matrix_that_it_cannot_read_is_refused():
    request = request_of("mxfp8", "mxfp8", "original", "codes", "codes")
    with pytest.raises(ValueError, match=r"z is torch.float32 \(32, 32\)"):
        quantize_activated(request, torch.zeros(32, 32), None, "gelu")
    z = torch.zeros(32, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"dh is .* it takes contiguous bfloat16 \(32, 16\)"):
        quantize_activated(request, z, z, "swiglu")


@pytest.mark.parametrize("kind", INPUTS)
def test_shapes_in_traced_graphs(kind):
    request = request_of("mxfp8", "fp8_block", "original", "exact", "codes")
    with FakeTensorMode():
        z = torch.empty(64, INPUTS[kind] * 128, device="cuda", dtype=torch.bfloat16)
        h = torch.empty(64, 128, device="cuda", dtype=torch.bfloat16)
        forward, backward = quantize_activated(request, z, None, kind), quantize_activated(request, z, h, kind)
    assert [tuple(t.shape) for t in forward] == [(64, 128), (128, 64), (128, 1)]
    width = INPUTS[kind] * 128
    assert [tuple(t.shape) for t in backward] == [(64, width), (width, 64), (width, 1)]
