"""Attention of cuDNN's forward and flash attention's backward: against torch's in float32, and twice the same bytes."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.nn import quantization, sdpa
from hqsweep.nn.sdpa import attend

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper")
SHAPES = [(2, 3, 64, 64), (1, 2, 1000, 128), (3, 1, 37, 96), (2, 2, 32, 8), (1, 4, 129, 24), (4, 6, 256, 64)]


def drawn(b, h, t, e, dtype=torch.bfloat16):
    """q, k, v and the output's gradient as attention has them: [B, T, H, E] turned, q, k and v in one tensor."""
    generator = torch.Generator().manual_seed(t + e)
    qkv, do = (torch.randn(b, t, n * h * e, generator=generator).to("cuda", dtype) for n in (3, 1))
    q, k, v = (x.transpose(1, 2) for x in qkv.view(b, t, 3, h, e).unbind(2))
    return [q, k, v, do.view(b, t, h, e).transpose(1, 2)]


def results(function, q, k, v, do, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = function(q, k, v, **options)
    o.backward(do)
    return [o.detach(), q.grad, k.grad, v.grad]


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_float32_and_repeat(shape, is_causal, monkeypatch):
    operands = drawn(*shape)
    ours = results(attend, *operands, is_causal=is_causal)
    exact = results(F.scaled_dot_product_attention, *(x.float() for x in operands), is_causal=is_causal)
    for a, b in zip(ours, exact, strict=True):
        assert (a.float() - b).norm() <= 0.01 * b.norm()
    for _ in range(5):
        assert all(map(torch.equal, ours, results(attend, *operands, is_causal=is_causal)))
    applied = []
    monkeypatch.setattr(sdpa._CudnnForward, "apply", lambda *args: applied.append(args))
    attend(*operands[:3], is_causal=is_causal)
    assert applied


@pytest.mark.gpu
def test_torch_chooses_otherwise(monkeypatch, deterministic):
    """Without determinism, with torch's operators asked for, and for what one of the kernels does not take."""
    monkeypatch.setattr(sdpa._CudnnForward, "apply", None)
    q, k, v, _ = drawn(1, 2, 64, 64)
    with quantization(kernels=False):
        attend(q, k, v, is_causal=True)
    for x in (q.float(), q[:, :, :31], drawn(1, 2, 64, 136)[0], drawn(1, 2, 64, 12)[0]):
        attend(x, x, x, is_causal=True)
    monkeypatch.setattr(sdpa, "_tried", lambda *_: False)
    attend(q, k, v, is_causal=True)
    monkeypatch.undo()
    monkeypatch.setattr(sdpa._CudnnForward, "apply", None)
    attend(q, k[:, :, :32], v[:, :, :32], is_causal=False)
    torch.use_deterministic_algorithms(False)
    attend(q, k, v, is_causal=True)
    with pytest.raises(TypeError):
        torch.use_deterministic_algorithms(True)
        attend(q, k, v, is_causal=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_kernel_that_disagrees_or_raises_is_not_used(monkeypatch):
    device, right = torch.device("cuda"), sdpa._forward

    def fails(*_):
        raise RuntimeError

    assert sdpa._agree(device, 64, True)
    for wrong in (lambda *args: (right(*args)[0], right(*args)[1] + 0.1), fails):
        sdpa._agree.results.clear()
        monkeypatch.setattr(sdpa, "_forward", wrong)
        assert not sdpa._agree(device, 64, True)
    sdpa._agree.results.clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_graph_replays_it():
    operands = drawn(2, 2, 64, 64)
    results(attend, *operands, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = results(attend, *operands, is_causal=True)
    operands[0].mul_(2)
    graph.replay()
    assert all(map(torch.equal, outputs, results(attend, *operands, is_causal=True)))
