"""Attention of cuDNN's forward and a backward that repeats: against torch's in float32, and twice the same bytes."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.nn import quantization, sdpa
from hqsweep.nn.sdpa import CUDNN, FLASH, attend
from hqsweep.ops import attention

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper")
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


@pytest.fixture(params=[CUDNN, FLASH])
def way(request, deterministic, monkeypatch):
    """The only way back that is tried."""
    if request.param == CUDNN:
        pytest.importorskip("cudnn")
    sdpa._agreeing.results.clear()
    monkeypatch.setattr(sdpa, "_ways", lambda: [request.param])
    yield request.param
    sdpa._agreeing.results.clear()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_float32_and_repeat(shape, is_causal, way, monkeypatch):
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
    assert [args[-1] for args in applied] == [way]


@on_hopper
@pytest.mark.gpu
def test_torch_chooses_otherwise(monkeypatch, deterministic):
    """Without determinism, with torch's operators asked for, and for what one of the kernels does not take."""
    monkeypatch.setattr(sdpa._CudnnForward, "apply", None)
    q, k, v, _ = drawn(1, 2, 64, 64)
    with quantization(kernels=False):
        attend(q, k, v, is_causal=True)
    for x in (q.float(), q[:, :, :31], drawn(1, 2, 64, 136)[0], drawn(1, 2, 64, 12)[0]):
        attend(x, x, x, is_causal=True)
    monkeypatch.setattr(sdpa, "_tried", lambda *_: None)
    attend(q, k, v, is_causal=True)
    monkeypatch.undo()
    monkeypatch.setattr(sdpa._CudnnForward, "apply", None)
    attend(q, k[:, :, :32], v[:, :, :32], is_causal=False)
    torch.use_deterministic_algorithms(False)
    attend(q, k, v, is_causal=True)
    with pytest.raises(TypeError):
        torch.use_deterministic_algorithms(True)
        attend(q, k, v, is_causal=True)


@on_hopper
@pytest.mark.gpu
def test_parts_of_batch_and_heads_have_the_bits_of_the_whole(monkeypatch, deterministic):
    """Also for a length that fills no block; a head whose scores are too many is flash attention's."""
    pytest.importorskip("cudnn")
    for shape in ((4, 6, 256, 64), (3, 4, 300, 128)):
        q, k, v, do = drawn(*shape)
        o, sums = sdpa.cudnn_forward(q, k, v, True)
        whole = attention.attention_back(do, q, k, v, o, sums, True)
        head = (-(-shape[2] // 128) * 128) ** 2
        for heads in (1, 2, shape[1], 2 * shape[1] + 1):
            monkeypatch.setattr(attention, "MOST_SCORES", heads * head)
            assert torch.equal(attention.attention_back(do, q, k, v, o, sums, True), whole)
        monkeypatch.setattr(attention, "MOST_SCORES", head - 1)
        flash = attention.flash_back(do, q, k, v, o, sums, True)
        by_flash = attention.attention_back(do, q, k, v, o, sums, True).unbind(2)
        assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(by_flash, flash, strict=True))
        assert not any(map(torch.equal, by_flash, whole.unbind(2)))  # which cuDNN computed
        monkeypatch.undo()


@pytest.mark.parametrize("fault", ["other bits", "not taken", "an error", None])
def test_parts_are_tried_before_they_are_trusted(monkeypatch, fault):
    def forward(q, k, v, is_causal):
        scores = q.float() @ k.float().mT
        return (scores.softmax(-1) @ v.float()).bfloat16(), scores.logsumexp(-1)

    def in_parts(q, k, v, is_causal, o, sums):
        if fault == "an error":
            raise TypeError("sdpa() got an unexpected keyword argument")
        for place, values in zip((o, sums), forward(q, k, v, is_causal), strict=True):
            place.copy_(values + (fault == "other bits"))
        return fault != "not taken"

    monkeypatch.setattr(sdpa, "cudnn_forward", forward)
    monkeypatch.setattr(sdpa, "attention_forward", in_parts)
    assert sdpa._same_in_parts.__wrapped__(torch.device("cpu"), 16, True) is (fault is None)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 6, 256, 64), (6, 4, 1024, 64), (2, 3, 300, 128)], ids=str)
def test_forward_in_parts_has_the_bits_of_torchs(shape, deterministic):
    """Of heads that lie in one projection, written where they belong."""
    pytest.importorskip("cudnn")
    sequences, heads, length, width = shape
    qkv = torch.randn(sequences, length, 3, heads, width, device="cuda").bfloat16()
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected, its_sums = sdpa.cudnn_forward(q, k, v, True)
    o = torch.full((sequences, length, heads, width), torch.nan, device="cuda").bfloat16().transpose(1, 2)
    sums = torch.full((sequences, heads, length), torch.nan, device="cuda")
    for part in (slice(sequences // 2, None), slice(sequences // 2)):
        assert attention.attention_forward(q[part], k[part], v[part], True, o[part], sums[part])
    assert torch.equal(o, expected)
    assert torch.equal(sums, its_sums)
    assert sdpa.repeats_in_parts(q, k, v, True)


def test_parts_fit_and_are_as_large_as_they_may_be(monkeypatch):
    monkeypatch.setattr(attention, "MOST_SCORES", 12 * 256**2)
    for shape, part in {
        (8, 4, 200, 64): (2, 4, 200, 64),
        (9, 4, 200, 64): (3, 4, 200, 64),
        (7, 4, 200, 64): (1, 4, 200, 64),
        (2, 16, 256, 64): (1, 8, 256, 64),
        (2, 4, 512, 64): (1, 2, 512, 64),
        (2, 4, 1024, 64): None,
    }.items():
        assert attention._part(shape) == part


@on_hopper
@pytest.mark.gpu
def test_many_blocks_repeat(deterministic):
    operands = drawn(4, 12, 2048, 64)
    first = results(attend, *operands, is_causal=True)
    for _ in range(20):
        assert all(map(torch.equal, first, results(attend, *operands, is_causal=True)))


@on_hopper
@pytest.mark.gpu
def test_under_compile_it_has_the_bits_of_eager(way):
    operands = drawn(2, 3, 64, 64)
    compiled = torch.compile(attend, fullgraph=True)
    expected = results(attend, *operands, is_causal=True)
    assert all(map(torch.equal, expected, results(compiled, *operands, is_causal=True)))


@on_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_kernel_that_disagrees_or_raises_is_not_used(monkeypatch):
    device, right = torch.device("cuda"), sdpa.cudnn_forward

    def fails(*_):
        raise RuntimeError

    way = CUDNN if attention.has_cudnn() else FLASH
    sdpa._agreeing.results.clear()
    assert sdpa._agreeing(device, 64, True) == way
    for wrong in (lambda *args: (right(*args)[0], right(*args)[1] + 0.1), fails):
        sdpa._agreeing.results.clear()
        monkeypatch.setattr(sdpa, "cudnn_forward", wrong)
        assert sdpa._agreeing(device, 64, True) is None
    monkeypatch.undo()
    sdpa._agreeing.results.clear()
    monkeypatch.setattr(sdpa, "attention_back", fails)
    assert sdpa._agreeing(device, 64, True) == FLASH
    sdpa._agreeing.results.clear()


@on_hopper
@pytest.mark.gpu
def test_a_graph_replays_it(way):
    operands = drawn(2, 2, 64, 64)
    results(attend, *operands, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = results(attend, *operands, is_causal=True)
    operands[0].mul_(2)
    graph.replay()
    assert all(map(torch.equal, outputs, results(attend, *operands, is_causal=True)))
