"""The compiled kernel and the torch reference give the same bytes."""

import pytest
import torch
from cases import KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import DISTRIBUTIONS, draw
from hqsweep.ops.quantize.kernels import supports
from hqsweep.ops.quantize.quantize import encode, quantize
from hqsweep.ops.quantize.request import Target

KEY = RngKey(seed=7, slot="test", step=2**33 + 5)


@settings(max_examples=300, deadline=None)
@given(
    text=st.sampled_from(KERNELS),
    distribution=st.sampled_from(sorted(DISTRIBUTIONS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 12),
    tail=st.integers(0, 15),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernel_equals_reference(text, distribution, dtype, rows, blocks, tail, transposed, seed):
    format = parse(text)
    cols = 16 * blocks if format.column_multiple == 16 else 16 * blocks + tail // 2 * 2
    x = draw(distribution, *((cols, rows) if transposed else (rows, cols)), seed, dtype)
    x = x.t() if transposed else x
    expected, actual = (encode(x, format, key=KEY, backend=b) for b in ("reference", "kernel"))
    for name in expected:
        assert torch.equal(expected[name].view(torch.uint8), actual[name].view(torch.uint8)), name


@pytest.mark.parametrize("text", KERNELS)
def test_exact_operand_equals_decoding_the_codes(text):
    format, x = parse(text), draw("heavy", 96, 160)
    fused, reference = (quantize(x, Target(format, "exact", KEY), backend=b).rowwise for b in ("kernel", "reference"))
    assert torch.equal(fused.matrix, reference.matrix.float())
    assert fused.divisor == reference.divisor
    assert (fused.factor is None) == (reference.factor is None)
    assert fused.factor is None or torch.equal(fused.factor, reference.factor)


def test_identity_and_given_grids_take_the_reference():
    x = draw("normal", 16, 32)
    assert not supports(x, parse("bf16"))
    format = parse("mxfp8")
    doubled = {"s": format.grid(x)["s"] * 2}
    assert torch.equal(encode(x, format, grid=doubled)["s"], encode(x, format)["s"] + 1)
    with pytest.raises(UserError, match="no kernel for bf16"):
        encode(x, parse("bf16"), backend="kernel")


def test_a_vector_is_no_matrix():
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        encode(torch.zeros(4), parse("mxfp8"))


def on_cpu_and_gpu(distribution, text):
    """Matrices of both orientations and all dtypes on the CPU, each with its copy of the same strides on the GPU; in
    bfloat16 also those of whole tiles of 128 x 128, and with last rows, or rows and columns, that are none."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for x in (draw(distribution, 96, 160, dtype=dtype), draw(distribution, 160, 96, dtype=dtype).t()):
            yield x, x.cuda()
    tall = 299 if text.startswith(("mxfp8", "mxfp6", "fp8")) else 304
    for shape in ((256, 256), (299, 256), (299, 352)):
        x = draw(distribution, *shape, dtype=torch.bfloat16)
        yield x, x.cuda()
    for shape in ((256, 256), (tall, 256), (tall, 352)):
        x = draw(distribution, *shape, dtype=torch.bfloat16).t()
        yield x, x.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("text", KERNELS)
def test_gpu_bytes_equal_cpu_bytes(text, distribution):
    """The reference and the kernel on the GPU, in both orientations."""
    format = parse(text)
    for x, on_gpu in on_cpu_and_gpu(distribution, text):
        expected = format.encode(x, None, KEY)
        for backend in ("reference", "kernel"):
            actual = encode(on_gpu, format, key=KEY, backend=backend)
            for name in expected:
                same = torch.equal(expected[name].view(torch.uint8), actual[name].cpu().view(torch.uint8))
                assert same, (backend, name, x.dtype, x.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("text", KERNELS)
def test_gpu_exact_operand_is_the_reference_operand(text, distribution):
    """Matrix (dtype and bytes, but for the bits of a NaN), factor and divisor."""
    format = parse(text)
    for x, on_gpu in on_cpu_and_gpu(distribution, text):
        wanted = format.operand(format.encode(x, None, KEY), tuple(x.shape))
        actual = quantize(on_gpu, Target(format, "exact", KEY), backend="kernel").rowwise
        assert actual.matrix.is_cuda and actual.matrix.dtype == wanted.matrix.dtype
        matrices = [torch.where(m.isnan(), 7.0, m).contiguous() for m in (wanted.matrix, actual.matrix.cpu())]
        assert torch.equal(*(m.view(torch.uint8) for m in matrices)), (x.dtype, x.stride())
        assert actual.divisor == wanted.divisor and (actual.factor is None) == (wanted.factor is None)
        assert wanted.factor is None or torch.equal(actual.factor.cpu(), wanted.factor)


@pytest.mark.gpu
def test_gpu_kernel_serves_every_format_but_identity():
    x = draw("normal", 96, 160).cuda()
    assert all(supports(x, parse(text)) for text in KERNELS)
    assert not supports(x, parse("bf16"))


@pytest.mark.gpu
def test_gpu_kernel_runs_on_the_current_stream_without_waiting_for_it():
    x = draw("heavy", 96, 160).cuda()
    for text in ("fp8_current", "fp8_block+2d", "mxfp8", "nvfp4+rht+sr"):
        expected = encode(x, parse(text), key=KEY, backend="kernel")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # capture fails at a synchronisation and records only the capturing stream
            actual = encode(x, parse(text), key=KEY, backend="kernel")
        graph.replay()
        assert all(torch.equal(expected[name], actual[name]) for name in expected), text
