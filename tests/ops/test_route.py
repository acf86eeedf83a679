"""Which experts tokens choose, on a GPU: against torch's softmax, sort and autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from hqsweep.ops.experts import place_choices, route, route_backward

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1, 1), (300, 8, 2), (64, 8, 8), (65, 60, 6), (1000, 256, 32), (7, 33, 3), (4097, 4, 1)]
"""M, E, k."""


@pytest.mark.parametrize("experts", [1, 2, 8, 60, 256])
@pytest.mark.parametrize("tokens,choices", [(0, 2), (1, 1), (100, 2), (512, 2), (513, 2), (5000, 7)])
def test_choices_are_placed_by_a_stable_sort(tokens, choices, experts):
    for most in {experts, max(1, experts // 3)}:  # also experts whom nobody chose
        generator = torch.Generator().manual_seed(tokens)
        chosen = torch.randint(0, most, (tokens, choices), generator=generator).cuda()
        order, places, counts = place_choices(chosen, experts)
        assert torch.equal(order, torch.argsort(chosen.flatten(), stable=True))
        assert torch.equal(places, torch.argsort(order))
        assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=experts))


def drawn(m, e):
    """Logits of which few are equal, on both sides of 0."""
    return (torch.randn(m, e, generator=torch.Generator().manual_seed(m + e)) * 3).cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_probabilities_are_chosen_and_weighed(shape):
    m, e, k = shape
    logits = drawn(m, e)
    p, chosen, weights, balance, order, places, tokens = route(logits, k)
    exact = F.softmax(logits.double(), dim=-1)
    torch.testing.assert_close(p.double(), exact, rtol=2**-18, atol=0)
    assert torch.equal(chosen, torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :k])
    top = exact.gather(1, chosen)
    torch.testing.assert_close(weights.double(), top / top.sum(-1, keepdim=True), rtol=2**-17, atol=0)
    assert torch.equal(tokens, torch.bincount(chosen.flatten(), minlength=e))
    expected = e * (tokens.double() / (m * k) * exact.mean(dim=0)).sum()
    torch.testing.assert_close(balance.double(), expected, rtol=2**-17, atol=0)
    assert all(map(torch.equal, place_choices(chosen, e), (order, places, tokens)))
    assert all(map(torch.equal, route(logits, k), (p, chosen, weights, balance, order, places, tokens)))


@pytest.mark.parametrize("coming_back", ["both", "weights", "balance"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_way_back_is_autograds(shape, coming_back):
    m, e, k = shape
    logits = drawn(m, e)
    p, chosen, weights, _, _, _, tokens = route(logits, k)
    dweights, dbalance = torch.sin(torch.arange(m * k, device="cuda").view(m, k).float()), torch.tensor(7.0).cuda()
    exact = logits.double().requires_grad_()
    probabilities = F.softmax(exact, dim=-1)
    probabilities.retain_grad()
    top = probabilities.gather(1, chosen)
    loss = 0
    if coming_back != "balance":
        loss = loss + (top / top.sum(-1, keepdim=True) * dweights).sum()
    if coming_back != "weights":
        loss = loss + 7 * e * (tokens.double() / (m * k) * probabilities.mean(dim=0)).sum()
    loss.backward()
    gradients = (None if coming_back == "balance" else dweights, None if coming_back == "weights" else dbalance)
    ours = route_backward(p, chosen, weights, tokens, *gradients)
    terms = float(probabilities.grad.abs().max())  # whose difference may cancel
    torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-4, atol=terms * 2**-20 + 1e-12)
    assert torch.equal(route_backward(p, chosen, weights, tokens, *gradients), ours)


def test_of_equals_the_lower_expert_and_nan_before_all():
    """Whatever comes in, an expert that there is: nothing is written outside."""
    p, chosen, weights, *_ = route(torch.zeros(70, 40, device="cuda"), 3)
    assert chosen.tolist() == [[0, 1, 2]] * 70
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))
    logits = torch.zeros(3, 40, device="cuda")
    logits[0, 35], logits[1, 7], logits[2, 38] = math.nan, math.inf, -math.inf
    p, chosen, weights, balance, order, *_ = route(logits, 2)
    assert p[:2].isnan().all() and chosen.tolist()[2] == [0, 1] and p[2, 38] == 0
    assert ((chosen >= 0) & (chosen < 40)).all() and balance.isnan()
    assert order.sort().values.tolist() == list(range(6))


def test_a_graph_and_refusals():
    logits = drawn(100, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = route(logits, 2)
    logits.copy_(drawn(101, 8)[1:])
    graph.replay()
    assert all(map(torch.equal, outputs, route(logits, 2)))
    for wrong, k in (
        (logits.double(), 2),
        (logits[0], 2),
        (logits, 9),
        (logits, 0),
        (drawn(4, 257), 2),
        (logits[:0], 2),
    ):
        with pytest.raises(ValueError, match=r"^logits (is|are) "):
            route(wrong, k)
    with pytest.raises(ValueError, match="experts are 257; the kernels place 1 to 256"):
        place_choices(outputs[1], 257)
    with pytest.raises(ValueError, match=r"chosen is torch\.int32"):
        place_choices(outputs[1].int(), 8)
    with pytest.raises(ValueError, match="dweights is "):
        route_backward(outputs[0], outputs[1], outputs[2], outputs[6], outputs[2][:3], None)
