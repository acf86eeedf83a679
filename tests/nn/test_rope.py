"""Heads out of a projection: on CPUs by torch's operators, on a GPU by the kernels, whose gradients are joined."""

import pytest
import torch
from torch import Tensor

from hqsweep.nn import AttentionOptions, MultiheadAttention, quantization, transformer
from hqsweep.nn import rope as nn_rope
from hqsweep.nn.rope import rotate, split_heads

B, T, H, E = 2, 9, 3, 16
BASE = 10000.0


def reference(qkv: Tensor, heads: int, base: float | None) -> list[Tensor]:
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    q, k = (x if base is None else rotate(x, base) for x in (q, k))
    return [x.transpose(1, 2) for x in (q, k, v)]


def rope_by_torch(qkv, heads, base):
    q, k, _ = reference(qkv, heads, base)
    return torch.stack([q.transpose(1, 2), k.transpose(1, 2)], dim=2)


def rope_in_place_by_torch(qkv, heads, base, back):
    qkv.detach()[..., : 2 * qkv.shape[2] // 3] = rope_by_torch(qkv, heads, base).flatten(2)


def join_by_torch(dq, dk, dv, base):
    """Turned back as the conjugate of what the conjugate turns to."""

    def back(x):
        conjugate = torch.tensor([1, -1], dtype=x.dtype).repeat(x.shape[-1] // 2)
        return rotate(x.transpose(1, 2) * conjugate, base).transpose(1, 2) * conjugate

    dq, dk = (x if base is None else back(x) for x in (dq, dk))
    return torch.stack([dq, dk, dv], dim=1).permute(0, 3, 1, 2, 4).flatten(2)


@pytest.fixture
def kernels_by_torch(monkeypatch):
    """The path of the kernels on a CPU: what is around them is the same."""
    monkeypatch.setattr(nn_rope, "use_kernels", lambda x: True)
    monkeypatch.setattr(nn_rope, "rope", rope_by_torch)
    monkeypatch.setattr(nn_rope, "rope_", rope_in_place_by_torch)
    monkeypatch.setattr(nn_rope, "join_heads", join_by_torch)


def leaf(device: str = "cpu", b: int = B, t: int = T, h: int = H, e: int = E) -> Tensor:
    x = torch.randn(b, t, 3 * h * e, generator=torch.Generator().manual_seed(b + t)).bfloat16()
    return x.to(device).requires_grad_()


def run(qkv: Tensor, base: float | None, *, heads: int = H, split=split_heads, **options: bool) -> list[Tensor]:
    """q, k and v, and the gradient of a projection, for fixed gradients of the three."""
    qkv.grad = None
    parts = split(qkv * 1, heads, base, **options)
    generator = torch.Generator().manual_seed(heads)
    torch.autograd.backward(parts, [torch.randn(x.shape, generator=generator).to(x) for x in parts])
    return [*(x.detach() for x in parts), qkv.grad]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("base", [BASE, None])
def test_the_way_of_the_kernels_is_that_of_torch(kernels_by_torch, base, in_place):
    qkv = leaf()
    assert all(map(torch.equal, run(qkv, base, in_place=in_place), run(qkv, base, split=reference)))


@pytest.mark.parametrize("base", [BASE, None])
def test_on_a_cpu_and_in_float32_torch_computes(base):
    for qkv in (leaf(), leaf().detach().float().requires_grad_()):
        assert all(map(torch.equal, run(qkv, base), run(qkv, base, split=reference)))


def test_in_place_keeps_the_projection_and_nothing_else(kernels_by_torch):
    qkv = leaf().detach()
    q, k, v = split_heads(qkv, H, BASE, in_place=True)
    assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == {qkv.untyped_storage().data_ptr()}
    q, k, _ = split_heads(qkv.clone(), H, BASE)
    assert q.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()


def test_a_projection_that_somebody_saved_is_not_changed_unnoticed(kernels_by_torch):
    qkv = leaf() * 1
    square = qkv.square()
    sum(part.float().sum() for part in split_heads(qkv, H, BASE, in_place=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_gradients_without_gaps_in_no_axis_are_copied_and_missing_ones_are_zero(kernels_by_torch):
    qkv = leaf()
    q, _, _ = split_heads(qkv, H, BASE)
    q.backward(torch.ones(1, dtype=torch.bfloat16).expand_as(q))
    expected, qkv.grad = qkv.grad, None
    reference(qkv, H, BASE)[0].sum().backward()
    assert torch.equal(expected, qkv.grad) and not qkv.grad[..., H * E :].any()


@pytest.fixture
def operators_by_torch(monkeypatch):
    """The operators themselves with a CPU's implementation, as traced graphs call them."""
    monkeypatch.setattr(nn_rope, "use_kernels", lambda x: True)
    library = torch.library.Library("hqsweep", "IMPL")
    for name, function in (("rope", rope_by_torch), ("rope_", rope_in_place_by_torch), ("join_heads", join_by_torch)):
        library.impl(name, function, "CPU")
    yield
    library._destroy()
    torch.compiler.reset()


@pytest.mark.parametrize("base", [BASE, None])
def test_a_trace_is_one_graph(operators_by_torch, base):
    """q and k out of place there, whoever allows to change the projection."""
    split = torch.compile(split_heads, backend="aot_eager", fullgraph=True)
    qkv = leaf()
    assert all(map(torch.equal, run(qkv, base, split=split, in_place=True), run(qkv, base, split=reference)))


def attention(device: str, base: float | None, *, width: int = 64, dtype: torch.dtype = torch.bfloat16, recipe="bf16"):
    torch.manual_seed(0)
    options = AttentionOptions(rope_base=base)
    return MultiheadAttention(2 * width, 2, name="a", recipe=recipe, dtype=dtype, options=options).to(device)


def results(module: MultiheadAttention, *, kernels: bool, checkpoint: bool = False) -> list[Tensor]:
    """y, dx and the gradients of the parameters."""
    module.zero_grad()
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 48, module.proj.weight.shape[0], generator=generator).cuda() for _ in range(2))
    x.requires_grad_()
    with quantization(kernels=kernels):
        y = module(x, checkpoint)
        y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("base", [BASE, None])
def test_on_a_gpu_the_kernels_compute_what_torch_does(base):
    """Up to the last bit of some elements; the same again with recomputation, and twice."""
    module = attention("cuda", base)
    ours = results(module, kernels=True)
    for a, b in zip(ours, results(module, kernels=False), strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()
    for again in (results(module, kernels=True), results(module, kernels=True, checkpoint=True)):
        assert all(map(torch.equal, ours, again))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("base", [BASE, None])
def test_gradients_that_are_written_joined_are_those_of_three(base, monkeypatch):
    """To the byte; a module of attention that somebody observes is called, and so is one that quantizes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper")
    pytest.importorskip("cudnn")
    calls, attend = [], transformer.attend_joined
    monkeypatch.setattr(transformer, "attend_joined", lambda *args: calls.append(args) or attend(*args))
    module = attention("cuda", base)
    ours = results(module, kernels=True)
    assert len(calls) == 1
    seen = []
    handle = module.dpa.register_forward_hook(lambda *_: seen.append(True))
    assert all(map(torch.equal, ours, results(module, kernels=True))) and seen
    handle.remove()
    results(attention("cuda", base, recipe={"linear": "bf16", "dpa": "fp8_current"}), kernels=True)
    torch.use_deterministic_algorithms(False)
    results(module, kernels=True)
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("base", [BASE, None])
def test_on_a_gpu_every_layout_of_gradients_gives_the_same_bytes(base):
    """Against torch's operators of a CPU, as far as one unit in the last place."""
    for qkv in (leaf("cuda"), leaf("cuda", 1, 33, 2, 96)):
        heads = H if qkv.shape[0] == B else 2
        for in_place in (False, True):
            ours = run(qkv, base, heads=heads, in_place=in_place)
            on_cpu = run(qkv.detach().cpu().requires_grad_(), base, heads=heads, split=reference)
            for a, b in zip(ours, on_cpu, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=2**-7, atol=2**-10)


OTHERS = {
    "float32": lambda: attention("cuda", BASE, dtype=torch.float32),
    "heads of 20": lambda: attention("cuda", BASE, width=20),
    "heads of 1024": lambda: attention("cuda", BASE, width=1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", OTHERS)
def test_what_the_kernels_do_not_take_goes_to_torch(case, monkeypatch):
    monkeypatch.setattr(nn_rope, "rope_", None)
    monkeypatch.setattr(nn_rope, "join_heads", None)
    assert results(OTHERS[case](), kernels=True)[0].isfinite().all()


@pytest.mark.gpu
def test_attention_makes_no_copy_between_the_linears():
    """From one linear to the other the device runs rotary positions and attention alone."""
    module = attention("cuda", BASE)
    qkv = torch.randn(2, 64, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module._core(qkv * 1).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = module._core(qkv.detach().clone().requires_grad_(), in_place=False)
        y.backward(torch.ones_like(y))
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [name for name in kernels if "copy" in name.lower() and "Memcpy" not in name]
    assert sum("move_heads" in name for name in kernels) == 2
    assert not copies, kernels
