"""Weights that are quantized once for as long as they stay what they are."""

import pickle

import pytest
import torch

from hqsweep.jobs.inputs import draw
from hqsweep.nn import Linear, quantization, set_recipe
from hqsweep.quant import HybridQuantizer, LinearQuantizers, Recipe

SR = {"input": "nvfp4", "weight": "nvfp4+sr", "grad_output": "nvfp4"}


@pytest.fixture
def made(monkeypatch):
    """Quantizer and directions of every quantization of a weight."""
    seen, real = [], HybridQuantizer.quantize

    def spy(self, x, **options):
        if options["key"].slot.endswith("weight"):
            seen.append([d for d in ("rowwise", "columnwise") if options[d]])
        return real(self, x, **options)

    monkeypatch.setattr(HybridQuantizer, "quantize", spy)
    return seen


def linear(quantizers="mxfp8"):
    torch.manual_seed(0)
    return Linear(64, 96, name="layer", quantizers=LinearQuantizers.parse(quantizers, "test"))


def train(module, index):
    x = draw("normal", 32, 64, index).requires_grad_()
    y = module(x)
    y.backward(draw("normal", 32, 96, index))
    return y.detach(), x.grad


def assert_trained_alike(cached, plain, batches=3, **context):
    for index in range(batches):
        with quantization(cache_weights=True, **context):
            a = train(cached, index)
        with quantization(**context):
            b = train(plain, index)
        assert all(map(torch.equal, a, b))
    assert torch.equal(cached.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("quantizers", ["mxfp8", "nvfp4|mxfp8@rowwise_dequantized", SR, "bf16"], ids=str)
def test_microbatches_share_operands_and_have_the_same_bits(made, quantizers):
    cached, plain = linear(quantizers), linear(quantizers)
    assert_trained_alike(cached, plain, seed=1, step=2)
    assert made.count(["rowwise"]) == made.count(["columnwise"]) == 1 + 3  # once, and once a batch without


def test_a_written_weight_is_quantized_again(made):
    module = linear()
    with quantization(cache_weights=True):
        before, _ = train(module, 0)
        with torch.no_grad():
            module.weight.mul_(2.0)
        after, _ = train(module, 0)
    assert made.count(["rowwise"]) == 2 and torch.equal(after, 2 * before)


def test_another_recipe_is_quantized_again(made):
    module = linear()
    with quantization(cache_weights=True):
        train(module, 0)
        set_recipe(module, Recipe.from_config({"linear": "nvfp4"}))
        y, _ = train(module, 0)
    assert torch.equal(y, train(linear("nvfp4"), 0)[0])


def test_random_bits_are_those_of_the_step(made):
    module = linear(SR)
    outputs = []
    for step in (1, 2, 2):
        with quantization(step=step, cache_weights=True):
            outputs.append(module(draw("normal", 32, 64)))
    assert not torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
    assert made.count(["rowwise"]) == 2


def test_inference_then_training_and_no_operand_outlives_its_context(made):
    module = linear()
    with quantization(cache_weights=True):
        with torch.no_grad():
            module(draw("normal", 32, 64))
        train(module, 0)
    assert made == [["rowwise"], ["columnwise"]]
    module(draw("normal", 32, 64))
    assert not module.workspace._made


def test_a_module_pickles_without_its_workspace():
    module = linear()
    with quantization(cache_weights=True):
        train(module, 0)
    assert not pickle.loads(pickle.dumps(module)).workspace._made
