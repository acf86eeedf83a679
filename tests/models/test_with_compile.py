"""torch.compile of a converted model: one graph without a break, for the whole and for each of its blocks."""

import pytest
import torch
from support.models.llamas import differences, llama, results
from torch._dynamo.utils import counters

import hqsweep
from hqsweep.nn import quantization

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()
    counters.clear()


def check(model, compiled, steps):
    """Bytes of a step of the model with and without its compiled forward."""
    for step in steps:
        with quantization(seed=1, step=step):
            assert not differences(results(model, step), results(compiled, step))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_whole_model_is_one_graph_for_every_step():
    model = llama(layers=1)
    conversion = hqsweep.convert(model, "nvfp4+sr")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    conversion.reset()
    check(model, compiled, (1, 2))
    assert not conversion.unused()


def test_blocks_that_are_compiled_one_by_one_are_one_graph():
    """The names of their modules, by which random bits are keyed, are no guards."""
    model, compiled = llama(layers=2), llama(layers=2)
    recipe = {"linear": "nvfp4+sr", "dpa": {"qkv": "nvfp4", "s": "nvfp4", "do": "nvfp4+sr", "dp": "nvfp4+sr"}}
    _, conversion = (hqsweep.convert(each, recipe) for each in (model, compiled))
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    check(model, compiled, (1, 2))
    assert not conversion.unused()
