"""torch.compile around modules: every byte stays, and one graph serves all steps where none has to break."""

import pytest
import torch
from experts import EXPERTS, GPU, ROWS, SPLITS, K, N, gradients, held
from torch._dynamo.utils import counters

from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, TransformerLayer, quantization
from hqsweep.recipe import Recipe


@pytest.mark.slow
@pytest.mark.parametrize("splits", [SPLITS, (ROWS // EXPERTS,) * EXPERTS], ids=["loop", "batch"])
def test_a_compiled_module_computes_the_same_bytes(splits):
    """Also after it has been called without: what is known of its formats by then is no part of a trace."""
    runs = []
    for compiled in (False, True):
        torch.compiler.reset()
        module = held("mxfp8", plan_capability=None if splits is SPLITS else GPU)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        x = draw("normal", ROWS, K).requires_grad_()
        for function, step in ((module, 1), (call, 2)):
            with quantization(seed=1, step=step):
                y = function(x, list(splits))
                y.backward(draw("normal", ROWS, N, step))
        runs.append({"y": y.detach(), "x": x.grad} | gradients(module))
    eager, traced = runs
    assert all(torch.equal(traced[name], expected) for name, expected in eager.items())


MODULES = {
    "linear": lambda recipe: Linear(K, N, name="l", recipe=recipe),
    "layer": lambda recipe: TransformerLayer(64, 96, 2, name="l", recipe=recipe),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4+sr", "nvfp4|mxfp8@rowwise_dequantized"])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_graph_without_a_break_serves_every_step(device, kind, text):
    """The step is an input of it: random bits are those of the step."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    module = MODULES[kind](Recipe.from_config({"linear": text})).to(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    outputs = []
    for step in (1, 2, 3, 4):
        results = []
        for call in (module, compiled):
            module.zero_grad()
            x = draw("normal", 64, 64 if kind == "layer" else K).view(2, 32, -1).float().to(device).requires_grad_()
            with quantization(seed=1, step=step):
                y = call(x)
                y.float().square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        outputs.append(results[1][0])
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(outputs[0], outputs[1]) == ("sr" not in text)
