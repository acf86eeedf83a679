"""Classes of converted modules: parametrizations that were there before come off again, as of torch's own modules."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.pytorch_utils import Conv1D

import hqsweep


class Halved(nn.Module):
    def forward(self, x):
        return x / 2

    def right_inverse(self, x):
        return x * 2


MADE = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda module: parametrize.register_parametrization(module, "weight", Halved()),
    "two": lambda module: [parametrize.register_parametrization(module, "weight", Halved()) for _ in range(2)],
}


def build(kind, make):
    torch.manual_seed(0)
    model = nn.Sequential({"linear": lambda: nn.Linear(64, 64), "conv1d": lambda: Conv1D(64, 64)}[kind]()).eval()
    MADE[make](model[0])
    return model, torch.randn(8, 64), type(model[0])


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_parametrizations_come_off_a_converted_module(kind, make):
    model, x, _ = build(kind, make)
    plain = model(x).detach()
    hqsweep.convert(model, "mxfp8")
    y, copied = model(x), copy.deepcopy(model)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(model(x), y) and isinstance(model[0].weight, nn.Parameter)
    assert not parametrize.is_parametrized(model[0]) and set(model.state_dict()) == {"0.weight", "0.bias"}
    assert parametrize.is_parametrized(copied[0])
    assert hqsweep.revert(model) == 1 and type(model[0]) is {"linear": nn.Linear, "conv1d": Conv1D}[kind]
    torch.testing.assert_close(model(x), plain)


@pytest.mark.parametrize("make", MADE)
def test_revert_gives_a_parametrized_module_back(make):
    model, x, own = build("linear", make)
    plain = model(x).detach()
    hqsweep.convert(model, "mxfp8")
    hqsweep.revert(model)
    assert type(model[0]) is own and torch.equal(model(x), plain)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


def test_one_of_several_comes_off_and_one_is_added():
    model, x, own = build("linear", "own")
    parametrize.register_parametrization(model[0], "bias", Halved())
    plain = model(x).detach()
    hqsweep.convert(model, "mxfp8")
    y = model(x)
    parametrize.remove_parametrizations(model[0], "bias")
    assert torch.equal(model(x), y) and parametrize.is_parametrized(model[0], "weight")
    hqsweep.revert(model)
    assert type(model[0]) is own and torch.equal(model(x), plain) and isinstance(model[0].bias, nn.Parameter)
    hqsweep.convert(model, "mxfp8")
    parametrize.register_parametrization(model[0], "bias", Halved())
    assert torch.equal(model(x), y)
    hqsweep.revert(model)
    assert torch.equal(model(x), plain) and parametrize.is_parametrized(model[0], "bias")
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[0], name)
    assert type(model[0]) is nn.Linear and torch.equal(model(x), plain)


def test_unconverted_siblings_keep_theirs():
    model, x, _ = build("linear", "own")
    other, _, _ = build("linear", "own")
    hqsweep.convert(model, "mxfp8")
    parametrize.remove_parametrizations(model[0], "weight")
    assert parametrize.is_parametrized(other[0]) and other(x).isfinite().all()
