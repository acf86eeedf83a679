"""Gains of several layers whose gradients are summed over ranks: at once, after all layers, and the same sums."""

import pytest
import torch
from torch import nn

from hqsweep.nn.norm_embedding import Norm
from hqsweep.nn.transformer import StreamLayer, through
from hqsweep.parallel.shared import tokens
from hqsweep.parallel.shared.tokens import SharedWeight, gains_summed_together

GROUP = object()


class Layer(StreamLayer):
    """A norm and a number that is multiplied by its output."""

    def __init__(self, index: int, said: list) -> None:
        super().__init__()
        self.norm = Norm(8, name=f"layers.{index}", recipe="format:bf16", normalization="LayerNorm")
        self.factor = nn.Parameter(torch.tensor(2.0 + index))
        self.factor.register_hook(lambda _: said.append(index))

    def _residual(self, x, branch, _):
        return x, self.factor * self.norm(x if branch is None else x + branch)


@pytest.fixture
def said(monkeypatch):
    """What happens in a backward: the layers' indices, and the sums over two ranks that have the same tokens."""
    events = []

    def twice(gradient, group):
        assert group is GROUP
        events.append(gradient.numel())
        return 2 * gradient

    monkeypatch.setattr(tokens, "sum_whole", twice)
    return events


def gradients(layers, x, group):
    for layer in layers:
        layer.norm.parallel = SharedWeight(tokens=group)
        layer.zero_grad()
    with gains_summed_together(layers):
        stream = through(layers, x)
    (stream.x + stream.branch).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for layer in layers for p in layer.norm.parameters()]


def test_one_sum_follows_all_layers(said):
    layers, x = [Layer(index, said) for index in range(3)], torch.randn(4, 8)
    alone = gradients(layers, x, None)
    said.clear()
    assert all(torch.equal(own, 2 * whole) for own, whole in zip(gradients(layers, x, GROUP), alone, strict=True))
    assert said == [2, 1, 0, 3 * 16]
    assert not tokens._TOGETHER


def test_gains_without_a_gradient_and_of_layers_under_fully_shard_have_none_or_their_own_sums(said, monkeypatch):
    layers, x = [Layer(index, said) for index in range(2)], torch.randn(4, 8)
    layers[0].norm.requires_grad_(False)
    first, _, *others = gradients(layers, x, GROUP)
    assert first is None and all(gradient is not None for gradient in others) and said == [1, 0, 16]
    said.clear()
    monkeypatch.setattr(tokens, "groups_of", lambda module: [GROUP])
    own = gradients(layers, x, GROUP)[2:]
    assert said == [1, 8, 8, 0] and all(map(torch.equal, own, others))


def test_a_forward_that_fails_or_has_no_gradients_leaves_nothing(said):
    layers = [Layer(0, said)]
    layers[0].norm.parallel = SharedWeight(tokens=GROUP)
    with torch.no_grad(), gains_summed_together(layers):
        through(layers, torch.randn(4, 8))
    with pytest.raises(RuntimeError), gains_summed_together(layers):
        through(layers, torch.randn(4, 9))
    assert not tokens._TOGETHER
