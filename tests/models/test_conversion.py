"""Converted modules know that they were called, in compiled graphs too; those that were not are named once."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hqsweep
from hqsweep.models.conversion import _WAITING


class Model(nn.Module):
    """A head whose weight is read by something else, as fused losses do, and a branch that may not be taken."""

    def __init__(self):
        super().__init__()
        self.body, self.branch, self.head = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, *, branch=False, fused=True):
        x = self.body(x)
        x = self.branch(x) if branch else x
        return F.linear(x, self.head.weight) if fused else self.head(x)


@pytest.fixture
def model():
    model = Model()
    hqsweep.convert(model, "mxfp8", lambda module, name: True, head=True)
    return model


def step(model, **options):
    """The warnings of a training step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(4, 32), **options).sum().backward()
    return [str(each.message) for each in caught]


def test_they_are_named_after_the_first_backward_pass_and_never_again(model):
    with torch.no_grad():
        model(torch.randn(4, 32))  # an evaluation is no step
    (text,) = step(model)
    assert "2 of 3 converted modules" in text and "branch, head" in text
    assert step(model) == [] and not any(part in _WAITING for part in hqsweep.nn.core.module.quantized_modules(model))


def test_nothing_is_said_where_all_computed(model):
    assert step(model, branch=True, fused=False) == step(model) == []


def test_what_is_converted_anew_counts_anew(model):
    step(model)
    hqsweep.convert(model, "mxfp4", lambda module, name: True, head=True).reset()
    (text,) = step(model, branch=True)
    assert "1 of 3" in text and "head" in text


def test_copies_and_pickles_carry_nothing_of_it(model):
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert step(other) == []
    assert len(step(model)) == 1


def test_a_reverted_model_says_nothing(model):
    hqsweep.revert(model)
    assert step(model) == []


@pytest.mark.slow
def test_a_compiled_call_counts(model):
    torch.compiler.reset()
    compiled = torch.compile(model.body, backend="aot_eager", fullgraph=True)
    conversion = hqsweep.conversion_of(model)
    for _ in range(2):
        conversion.reset()
        compiled(torch.randn(4, 32)).sum().backward()
        assert conversion.unused() == ["branch", "head"]


class Block(nn.Module):
    def __init__(self, recomputed):
        super().__init__()
        self.recomputed, self.a, self.never = recomputed, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=False) if self.recomputed else self.a(x)


@pytest.mark.slow
@pytest.mark.feature("H40")
def test_a_graph_with_activation_checkpointing_counts_its_calls():
    torch.compiler.reset()
    model = nn.Sequential(Block(True), Block(True), Block(False))
    conversion = hqsweep.convert(model, "mxfp8")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(torch.ones(32, 32, requires_grad=True)).sum().backward()
    assert conversion.unused() == ["0.never", "1.never", "2.never"]
    torch.compiler.reset()
