"""Mixtures of experts: routing by hand, and the module against its experts one by one."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.formats.inputs import draw
from hqsweep.nn import LayerNormMoE, MoEOptions, Probe, quantization
from hqsweep.nn.activation import swiglu
from hqsweep.nn.router import Router

DIM, FFN, EXPERTS, TOKENS = 32, 32, 4, 96


def mixture(linear="fp32", top_k=2, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = MoEOptions(experts=EXPERTS, top_k=top_k, **options)
    made = LayerNormMoE(DIM, FFN, name="m", recipe=linear, dtype=dtype, options=options)
    torch.nn.init.normal_(made.router.weight)
    return made


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_outputs_and_gradients_are_those_of_the_formula(top_k, shared):
    module = mixture(top_k=top_k, shared_expert=shared)
    made = []
    for function in (lambda x: module(x)[0], lambda x: by_hand(module, x)):
        x = draw("normal", TOKENS, DIM, 1).float().view(2, -1, DIM).requires_grad_()
        module.zero_grad()
        y = function(x)
        y.backward(draw("normal", TOKENS, DIM, 2).float().view(y.shape))
        made.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("linear", ["mxfp8", "nvfp4+row_scaled|mxfp8@rowwise_dequantized"])
def test_the_same_tokens_twice_give_the_same_bytes(linear):
    module = mixture({"input": linear, "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}, dtype=torch.bfloat16)
    made = []
    for _ in range(2):
        module.zero_grad()
        x = draw("normal", TOKENS, DIM, 1).requires_grad_()
        module(x)[0].backward(draw("normal", TOKENS, DIM, 2).float())
        made.append([x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


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
