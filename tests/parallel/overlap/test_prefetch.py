"""Which operands of weights are made while ranks wait, and when: linears that note what is asked of them."""

import pytest
import torch

from hqsweep.nn import Linear, TransformerLayer, quantization
from hqsweep.parallel.overlap import prefetch
from hqsweep.parallel.wire import p2p_copy

CPU = torch.device("cpu")


class Noting:
    """A linear that notes the inputs for which it makes operands, and makes none of width 0."""

    def __init__(self):
        self.shapes = []

    def early_operand(self, shape):
        self.shapes.append(shape)
        return f"operand {len(self.shapes)}" if shape[-1] else None


@pytest.fixture
def owed(monkeypatch):
    """What is to be done before the next wait."""
    work = []
    monkeypatch.setattr(p2p_copy, "owe", lambda group, device, each, purpose=None: work.append(each))
    return work


def test_a_layer_makes_its_operands_in_one_wait_and_gives_each_once(owed):
    first, second = Noting(), Noting()
    with prefetch.early_weights([(first, (8,)), (second, (8, 0))]):
        assert prefetch.early_operand(first) == {}  # nobody has waited yet
        prefetch.owe_weights(None, CPU)
        owed.pop()()
        prefetch.owe_weights(None, CPU)
        assert owed == [] and (first.shapes, second.shapes) == ([(8,)], [(8, 0)])
        assert prefetch.early_operand(first) == {"rowwise": "operand 1"}
        assert prefetch.early_operand(first) == {} and prefetch.early_operand(second) == {}


def test_operands_do_not_outlive_the_call_of_their_layer(owed):
    linear = Noting()
    with prefetch.early_weights([(linear, (8,))]):
        prefetch.owe_weights(None, CPU)
        owed.pop()()
    assert prefetch.early_operand(linear) == {}
    prefetch.owe_weights(None, CPU)
    assert owed == []


def test_backward_makes_what_it_multiplies_in_its_order():
    made = []
    makers = {name: (lambda name=name: made.append(name)) for name in ("qkv", "proj", "fc1", "fc2")}
    assert prefetch.made_in_backward(makers["proj"]) == [makers["proj"]]  # outside of any layer each by itself
    with prefetch.early_weights([]):
        prefetch.made_in_backward(makers["qkv"])
        of_proj = prefetch.made_in_backward(makers["proj"])
        of_fc2 = prefetch.made_in_backward(makers["fc2"], makers["fc1"])
    for each in of_fc2:
        each()
    assert made == ["fc2", "fc1", "proj", "qkv"]
    assert of_proj == [makers["proj"], makers["qkv"]]


def test_the_operand_is_the_one_that_a_call_would_make_unless_somebody_observes_the_call():
    linear = Linear(64, 32, name="l", recipe="mxfp8")
    with quantization(step=1), torch.no_grad():
        operand = linear.early_operand((4, 8))
        expected = linear.quantizers.weight.quantize(linear.weight.bfloat16(), rowwise="exact").rowwise
    assert torch.equal(operand.matrix, expected.matrix)
    linear.register_forward_pre_hook(lambda *_: None)
    assert linear.early_operand((4, 8)) is None


def test_a_layer_of_one_rank_makes_nothing_early(monkeypatch):
    monkeypatch.setattr(Linear, "early_operand", lambda *_: pytest.fail("made early"))
    layer = TransformerLayer(32, 64, 2, name="layer", recipe="bf16", dtype=torch.float32)
    layer(torch.randn(2, 4, 32)).sum().backward()
