"""Mixtures of experts: routing by hand, and the module against its experts one by one."""

import pytest
import torch
import torch.nn.functional as F
from cases import bare

from hqsweep.formats.inputs import draw
from hqsweep.nn import LayerNormMoE, MoEOptions, Probe, grouped, quantization, router, transformer
from hqsweep.nn.layernorm_linears import swiglu
from hqsweep.nn.router import Router
from hqsweep.ops.splits import Splits

DIM, FFN, EXPERTS, TOKENS = 32, 32, 4, 96


def mixture(linear="fp32", top_k=2, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = MoEOptions(experts=EXPERTS, top_k=top_k, **options)
    module = LayerNormMoE(DIM, FFN, name="m", recipe=bare(linear), dtype=dtype, options=options)
    torch.nn.init.normal_(module.router.weight)
    return module


def test_routing_by_hand():
    """Two tokens, three experts, logits that are logarithms of probabilities."""
    router = Router(3, 3, 2)
    probabilities = torch.tensor([[0.5, 0.125, 0.375], [0.25, 0.25, 0.5]])
    with torch.no_grad():
        router.weight.copy_(torch.eye(3))
    routing = router(probabilities.log())
    assert routing.chosen.tolist() == [[0, 2], [2, 0]]  # of the equal 0.25 the lower index
    torch.testing.assert_close(routing.weights, torch.tensor([[4 / 7, 3 / 7], [2 / 3, 1 / 3]]))
    assert routing.tokens.tolist() == [2, 0, 2]
    torch.testing.assert_close(routing.balance, torch.tensor(3 * (0.5 * 0.375 + 0.5 * 0.4375)))
    assert routing.order.tolist() == [0, 3, 1, 2]  # expert 0: tokens 0 and 1; expert 2: tokens 0 and 1
    rows = routing.dispatch(torch.tensor([[1.0], [10.0]]))
    assert rows.flatten().tolist() == [1, 10, 1, 10]
    combined = routing.combine(torch.tensor([[7.0], [3.0], [14.0], [6.0]]))
    torch.testing.assert_close(combined, torch.tensor([[10.0], [5.0]]))


def test_equal_probabilities_take_the_lowest_experts_and_balance_is_one():
    router = Router(8, 6, 3)
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(5, 8))
    assert routing.chosen.tolist() == [[0, 1, 2]] * 5
    assert routing.balance.item() == pytest.approx(1.0)


def test_balance_grows_with_the_load_and_pulls_probabilities_down():
    router = Router(4, 4, 1)
    with torch.no_grad():
        router.weight.zero_()[2] = 1.0
    routing = router(torch.ones(16, 4))
    assert routing.tokens.tolist() == [0, 0, 16, 0] and routing.balance > 2
    routing.balance.backward()
    descent = -router.weight.grad.sum(dim=1)
    assert descent[2] < 0 and (descent[[0, 1, 3]] > 0).all()


def by_hand(module, x):
    """Every expert on every token, and the weighted sum by torch's own autograd."""
    h = module.norm(x).flatten(0, -2)
    top, chosen = F.softmax(h @ module.router.weight.t(), dim=-1).topk(module.router.top_k)
    weights = torch.zeros(len(h), EXPERTS).scatter(1, chosen, top / top.sum(dim=-1, keepdim=True))
    experts = [swiglu(h @ a.t()) @ b.t() for a, b in zip(module.fc1.weight, module.fc2.weight, strict=True)]
    y = (torch.stack(experts, dim=1) * weights.unsqueeze(-1)).sum(dim=1)
    return (y if module.shared is None else y + module.shared(h)).view(x.shape)


@pytest.mark.feature("F79", "H32")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_outputs_and_gradients_are_those_of_the_formula(top_k, shared):
    module = mixture(top_k=top_k, shared_expert=shared)
    runs = []
    for function in (lambda x: module(x)[0], lambda x: by_hand(module, x)):
        x = draw("normal", TOKENS, DIM, 1).float().view(2, -1, DIM).requires_grad_()
        module.zero_grad()
        y = function(x)
        y.backward(draw("normal", TOKENS, DIM, 2).float().view(y.shape))
        runs.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("linear", ["mxfp8", "nvfp4+row_scaled|mxfp8@rowwise_dequantized"])
def test_the_same_tokens_twice_give_the_same_bytes(linear):
    module = mixture({"input": linear, "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        module.zero_grad()
        x = draw("normal", TOKENS, DIM, 1).requires_grad_()
        module(x)[0].backward(draw("normal", TOKENS, DIM, 2).float())
        runs.append([x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_no_recipe_quantizes_the_router():
    """Logits under the coarsest recipe are those of fp32 to the byte, whatever the experts make of the tokens."""
    x = draw("normal", TOKENS, DIM, 1)
    low, high = (mixture(linear, dtype=torch.bfloat16) for linear in ("mxfp4", "fp32"))
    routings = [module.router(module.norm(x)) for module in (low, high)]
    assert torch.equal(routings[0].weights, routings[1].weights)
    assert routings[0].weights.dtype == low.router.weight.dtype == torch.float32
    assert not torch.equal(low(x)[0], high(x)[0])


def test_a_probe_is_told_the_tokens_of_each_expert():
    module, probe = mixture("mxfp8", dtype=torch.bfloat16), Probe(3)
    with quantization(probe=probe):
        y, _, tokens = module(draw("normal", TOKENS, DIM, 1))
        y.sum().backward()
    rows = [row for row in probe.rows if row["tensor"] == "routed"]
    assert [(row["layer"], row["tokens"]) for row in rows] == [(f"m.{e}", n) for e, n in enumerate(tokens.tolist())]
    assert sum(row["load"] for row in rows) == pytest.approx(EXPERTS) and sum(tokens.tolist()) == 2 * TOKENS
    named = {row["layer"] for row in probe.rows if row["tensor"] == "input"}
    assert named == {f"m.{fc}.{e}" for fc in ("fc1", "fc2") for e, n in enumerate(tokens.tolist()) if n}


def test_top_k_is_one_to_all():
    for top_k in (0, EXPERTS + 1):
        with pytest.raises(ValueError, match=f"m: top_k is {top_k} of 4 experts; it takes 1 to 4"):
            mixture(top_k=top_k)


def route_by_torch(logits, choices):
    """What Router computes without kernels."""
    p = F.softmax(logits, dim=-1)
    chosen = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :choices].contiguous()
    top, order = p.gather(1, chosen), torch.argsort(chosen.flatten(), stable=True)
    tokens = torch.bincount(chosen.flatten(), minlength=p.shape[1])
    balance = p.shape[1] * (tokens.float() / chosen.numel() * p.mean(dim=0)).sum()
    return [p, chosen, top / top.sum(-1, keepdim=True), balance, order, torch.argsort(order), tokens]


def route_backward_by_torch(p, chosen, weights, tokens, dweights, dbalance):
    with torch.enable_grad():
        logits = p.log().requires_grad_()
        _, _, weights, balance, *_ = route_by_torch(logits, chosen.shape[1])
        ends = [(x, dx) for x, dx in ((weights, dweights), (balance, dbalance)) if dx is not None]
        return torch.autograd.grad([x for x, _ in ends], logits, [dx for _, dx in ends])[0]


def rows_by_torch(x, places, choices, starts=None, count=0):
    rows = x.new_zeros((count or len(places), x.shape[1]), dtype=torch.bfloat16)
    rows[places] = x.bfloat16().repeat_interleave(choices, dim=0)
    return rows


def combined_by_torch(rows, places, weights, added=None):
    y = (rows[places].view(*weights.shape, -1).float() * weights.unsqueeze(-1)).sum(dim=1)
    return y if added is None else y + added.float()


def gradients_by_torch(dy, rows, places, weights, added, starts=None):
    drows = torch.zeros_like(rows)
    drows[places] = (dy.unsqueeze(1) * weights.unsqueeze(-1)).to(rows.dtype).flatten(0, 1)
    dweights = (dy.unsqueeze(1) * rows[places].view(*weights.shape, -1).float()).sum(dim=-1)
    return [drows, dweights, *([dy.to(rows.dtype)] if added else [])]


@pytest.fixture
def kernels_by_torch(monkeypatch):
    """The path of the kernels on a CPU: what is around them is the same."""
    ours = {
        "use_kernels": lambda x: True,
        "route": route_by_torch,
        "route_backward": route_backward_by_torch,
        "dispatch_rows": rows_by_torch,
        "sum_rows": lambda rows, places, k, dtype: (
            rows[places].view(-1, k, rows.shape[1]).sum(1, dtype=torch.float32).bfloat16().to(dtype)
        ),
        "combine_rows": combined_by_torch,
        "combine_rows_backward": gradients_by_torch,
    }
    for name, function in ours.items():
        monkeypatch.setattr(router, name, function)


def results(module, device="cpu", **options):
    """y, balance, tokens, dx and the gradients of the parameters."""
    module.zero_grad()
    x = draw("normal", TOKENS, DIM, 1).float().to(device).requires_grad_()
    with quantization(**options):
        y, balance, tokens = module(x)
        dy = draw("normal", TOKENS, DIM, 2).float().to(device)
        torch.autograd.backward([y, balance], [dy, torch.full_like(balance, 3.0)])
    return [y.detach(), balance.detach(), tokens, x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_way_of_the_kernels_is_that_of_torch(kernels_by_torch, top_k, shared, monkeypatch):
    """To the byte but for the router, whose logits are logarithms on the way back of this test."""
    module = mixture("mxfp8", top_k=top_k, dtype=torch.bfloat16, shared_expert=shared)
    ours = results(module)
    monkeypatch.undo()
    for a, b in zip(ours, results(module), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_on_a_gpu_the_kernels_compute_what_torch_does(top_k, shared):
    """Up to the order of sums, which may move a code of the experts' operands; and twice the same bytes."""
    module = mixture("mxfp8", top_k=top_k, dtype=torch.bfloat16, shared_expert=shared).cuda()
    ours = results(module, "cuda", kernels=True)
    for a, b in zip(ours, results(module, "cuda", kernels=False), strict=True):
        assert (a - b).double().norm() <= 0.02 * b.double().norm() + 1e-3
    assert all(map(torch.equal, ours, results(module, "cuda", kernels=True)))


def test_experts_that_only_a_device_knows_are_filled_up_as_by_each_linear(kernels_by_torch, monkeypatch):
    """A CPU that passes for a device: the same bytes as where fc1 and fc2 each fill up and take out again."""
    module = mixture("nvfp4", dtype=torch.bfloat16, shared_expert=True)

    def of_a_device(splits, rows, experts=None):
        splits_of_device = {"rows": rows, "count": EXPERTS, "sizes": None, "device_sizes": splits}
        return splits if isinstance(splits, Splits) else Splits(**splits_of_device)

    monkeypatch.setattr(transformer.Splits, "of", of_a_device)
    runs, calls = [], []
    right = grouped.place_rows
    monkeypatch.setattr(grouped, "place_rows", lambda *a: (calls.append(a), right(*a))[1])
    for moves in (transformer.moves_by_kernels, lambda h, dtype: False):
        monkeypatch.setattr(transformer, "moves_by_kernels", moves)
        runs.append((results(module), len(calls)))
    (ours, none), (expected, four) = runs  # fc1 and fc2 each place rows in forward, and again in backward
    assert all(map(torch.equal, ours, expected))
    assert (none, four) == (0, 4)


@pytest.mark.gpu
def test_what_the_kernels_do_not_take_goes_to_torch(monkeypatch):
    for name in ("dispatch_rows", "combine_rows"):
        monkeypatch.setattr(router, name, None)
    assert results(mixture(dtype=torch.float32).cuda(), "cuda")[0].isfinite().all()
    monkeypatch.setattr(router, "route", None)
    many = Router(DIM, 300, 2).cuda()
    assert many(torch.randn(7, DIM, device="cuda")).tokens.sum() == 14
    assert Router(DIM, 4, 2).cuda()(torch.randn(0, DIM, device="cuda")).tokens.sum() == 0
