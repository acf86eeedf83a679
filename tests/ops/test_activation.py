"""Activations on CUDA, against torch's operators in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from hqsweep.formats.hadamard import hadamard
from hqsweep.ops.elementwise import INPUTS, activation, activation_backward, takes_activation

KINDS = tuple(INPUTS)
SHAPES = [(1, 8), (3, 24), (128, 384), (257, 1000), (1024, 2048)]
gpu = pytest.mark.gpu


def matrices(kind, rows, width, seed=0):
    """z [rows, inputs * width], mostly near 0 and some of every magnitude, and dh [rows, width]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    z = torch.randn(rows, INPUTS[kind] * width, generator=generator, device="cuda")
    z *= torch.exp2(torch.randint(-8, 7, z.shape, generator=generator, device="cuda"))
    dh = torch.randn(rows, width, generator=generator, device="cuda")
    return z.bfloat16(), dh.bfloat16()


def reference(kind, z, dh):
    """h and dz by torch's operators, unrounded."""
    z = z.double().requires_grad_()
    if kind == "swiglu":
        gate, up = z.chunk(2, dim=-1)
        h = F.silu(gate) * up
    else:
        h = F.gelu(z, approximate="tanh")
    h.backward(dh.double())
    return h.detach(), z.grad


@pytest.mark.feature("T3")
@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_torch(kind, shape):
    """Rounding to bf16 errs by 2^-8; float32 inside by little, beside the largest term of a sum that may cancel. Far
    below 0 torch's gelu errs by 2^-53 x in its 1 + tanh."""
    z, dh = matrices(kind, *shape)
    h, dz = reference(kind, z, dh)
    atol = 1e-13 if kind == "gelu" else 1e-30
    torch.testing.assert_close(activation(z, kind)[0].double(), h, rtol=2**-7.9, atol=atol)
    largest = dh.double() * (1 + z.double().abs().amax(-1, keepdim=True))
    terms = torch.cat([largest] * INPUTS[kind], dim=-1).abs()
    error = (activation_backward(dh, z, kind)[0].double() - dz).abs()
    assert (error <= 2**-7.9 * dz.abs() + 2**-20 * terms).all()


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_special_values_are_those_of_torch(kind):
    """Infinities and NaN, zeros, the largest and the least numbers, each beside each."""
    values = [0.0, -0.0, 1.0, -1.0, 80.0, -80.0, 200.0, -200.0, 3e38, -3e38, 1e-38, -1e-40]
    values += [float("inf"), -float("inf"), float("nan")]
    pairs = torch.tensor([(a, b) for a in values for b in values], device="cuda")
    z = pairs.repeat_interleave(8, dim=1).bfloat16()
    z = z if kind == "swiglu" else z[:, :8].contiguous()
    dh = torch.ones(len(z), 8, device="cuda", dtype=torch.bfloat16)
    wide = z.float().requires_grad_()
    h = F.silu(wide[:, :8]) * wide[:, 8:] if kind == "swiglu" else F.gelu(wide, approximate="tanh")
    h.backward(dh.float())
    close = {"rtol": 2**-7, "atol": 1e-35, "equal_nan": True}
    torch.testing.assert_close(activation(z, kind)[0], h.detach().bfloat16(), **close)
    torch.testing.assert_close(activation_backward(dh, z, kind)[0], wide.grad.bfloat16(), **close)


@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_amax_is_that_of_the_output(kind, shape):
    z, dh = matrices(kind, *shape)
    z[0, 0] = float("nan")
    for plain, (out, amax) in (
        (activation(z, kind), activation(z, kind, True)),
        (activation_backward(dh, z, kind), activation_backward(dh, z, kind, True)),
    ):
        assert torch.equal(plain[0].view(torch.int16), out.view(torch.int16))
        assert amax.shape == (1, 1)
        assert amax.item() == out.float().abs().nan_to_num(0.0, posinf=float("inf")).max().item()


@gpu
@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("shape", [(16, 8), (48, 24), (128, 384), (1024, 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_amax_of_transformed_columns(kind, shape, signs):
    """The matrix has a NaN, which counts as 0 with all that it is transformed with."""
    z, dh = matrices(kind, *shape)
    z[0, 0] = float("nan")
    for plain, (out, own, columns) in (
        (activation(z, kind, True), activation(z, kind, True, signs)),
        (activation_backward(dh, z, kind, True), activation_backward(dh, z, kind, True, signs)),
    ):
        assert torch.equal(plain[0].view(torch.int16), out.view(torch.int16))
        assert torch.equal(plain[1], own)
        expected = hadamard(out.t().contiguous(), signed=signs).bfloat16().abs().nan_to_num(0.0).max()
        assert columns.item() == expected.item()


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_equal_and_may_be_captured(kind):
    z, dh = matrices(kind, 304, 520)

    def all_of_it():
        forward = activation(z, kind, True) + activation(z, kind, True, True)
        return forward + activation_backward(dh, z, kind, True) + activation_backward(dh, z, kind, True, True)

    first = all_of_it()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of_it()
    for _ in range(2):
        graph.replay()
        for one, other in zip(first, captured, strict=True):
            assert torch.equal(one, other)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_empty_matrices(kind):
    for rows, width in ((0, 16), (4, 0)):
        z = torch.zeros(rows, INPUTS[kind] * width, device="cuda", dtype=torch.bfloat16)
        h, amax = activation(z, kind, True)
        assert h.shape == (rows, width)
        assert amax.item() == 0
        assert activation_backward(h, z, kind)[0].shape == z.shape


def test_what_the_kernels_take():
    assert takes_activation(torch.zeros(2, 16, dtype=torch.bfloat16), "swiglu")
    assert takes_activation(torch.zeros(2, 3, 8, dtype=torch.bfloat16), "gelu")
    assert not takes_activation(torch.zeros(2, 24, dtype=torch.bfloat16), "swiglu")
    assert not takes_activation(torch.zeros(2, 16), "swiglu")
    assert not takes_activation(torch.zeros(2, 12, dtype=torch.bfloat16), "gelu")


@pytest.mark.parametrize(
    ("z", "kind", "message"),
    [
        (torch.zeros(4, 16), "swiglu", "z is torch.float32 .* swiglu takes contiguous bfloat16 .* a multiple of 16$"),
        (torch.zeros(4, 24, dtype=torch.bfloat16), "swiglu", "multiple of 16"),
        (torch.zeros(4, 4, dtype=torch.bfloat16), "gelu", "multiple of 8"),
        (torch.zeros(16, 8, dtype=torch.bfloat16).t(), "gelu", "not contiguous"),
        (torch.zeros(32, 16, dtype=torch.bfloat16)[:, :8], "gelu", "not contiguous"),
        (torch.zeros(72, dtype=torch.bfloat16)[1:65].view(4, 16), "gelu", "at a multiple of 16 bytes"),
        (torch.zeros(2, 2, 16, dtype=torch.bfloat16), "gelu", "two axes"),
        (torch.zeros(4, 16, dtype=torch.bfloat16), "relu", "activation is 'relu'; allowed: swiglu, gelu"),
    ],
)
def test_what_they_cannot_read_is_refused(z, kind, message):
    with pytest.raises(ValueError, match=message):
        activation(z, kind)


def test_columns_are_transformed_in_strips():
    with pytest.raises(ValueError, match="z has 8 rows; columns are transformed in strips of 16 rows"):
        activation(torch.zeros(8, 8, dtype=torch.bfloat16), "gelu", True, True)
    with pytest.raises(ValueError, match="with amax=True"):
        activation(torch.zeros(16, 8, dtype=torch.bfloat16), "gelu", False, True)


@pytest.mark.parametrize(
    "dh",
    [
        torch.zeros(4, 8),
        torch.zeros(4, 16, dtype=torch.bfloat16),
        torch.zeros(8, 4, dtype=torch.bfloat16).t(),
        torch.zeros(40, dtype=torch.bfloat16)[1:33].view(4, 8),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(dh):
    with pytest.raises(ValueError, match=r"dh is .* it takes contiguous bfloat16 \(4, 8\) at a multiple of 16 bytes"):
        activation_backward(dh, torch.zeros(4, 16, dtype=torch.bfloat16), "swiglu")


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_in_traced_graphs(kind):
    with FakeTensorMode():
        z = torch.empty(6, INPUTS[kind] * 24, device="cuda", dtype=torch.bfloat16)
        h, amax, _ = activation(z, kind, True, False)
        (dz,) = activation_backward(h, z, kind)
    assert (h.shape, h.dtype, amax.shape, amax.dtype) == ((6, 24), torch.bfloat16, (1, 1), torch.float32)
    assert (dz.shape, dz.dtype, dz.device.type) == (z.shape, torch.bfloat16, "cuda")


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_behind_the_end_are_left_out(kind):
    z, dh = matrices(kind, 40, 64)
    end = torch.tensor([17], device="cuda")
    for results, whole in (
        (activation(z, kind, True, None, end), activation(z[:17], kind, True)),
        (activation_backward(dh, z, kind, True, None, end), activation_backward(dh[:17], z[:17], kind, True)),
    ):
        assert torch.equal(results[0][:17], whole[0]) and torch.equal(results[1], whole[1])
    with pytest.raises(ValueError, match=r"takes int64 \[1\] on the device of z, without signs"):
        activation(z[:32], kind, True, True, end)
