"""torch.compile around modules: every byte stays, and one graph serves all steps where none has to break."""

import copy
import sys

import pytest
import torch
from cases import HYBRID, PLAIN, RANDOM
from support.nn.experts import EXPERTS, GPU, ROWS, K, N, gradients, held
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from hqsweep.config.model import ModelConfig
from hqsweep.formats.inputs import draw
from hqsweep.nn import (
    DotProductAttention,
    GroupedLinear,
    Linear,
    MultiheadAttention,
    TransformerLayer,
    autocast,
    quantization,
    quantized_model_init,
)
from hqsweep.recipe import Recipe
from hqsweep.train.model import GPT


@pytest.mark.slow
def test_a_compiled_batch_of_experts_computes_the_same_bytes():
    """Also after it has been called without: what is known of its formats by then is no part of a trace."""
    runs = []
    for compiled in (False, True):
        torch.compiler.reset()
        module = held("mxfp8", plan_capability=GPU)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        x = draw("normal", ROWS, K).requires_grad_()
        for function, step in ((module, 1), (call, 2)):
            with quantization(seed=1, step=step):
                y = function(x, [ROWS // EXPERTS] * EXPERTS)
                y.backward(draw("normal", ROWS, N, step))
        runs.append({"y": y.detach(), "x": x.grad} | gradients(module))
    eager, traced = runs
    assert all(torch.equal(traced[name], expected) for name, expected in eager.items())


class Model(torch.nn.Module):
    """Tokens -> the loss of a whole GPT that is to give them back."""

    def __init__(self, recipe):
        super().__init__()
        self.gpt = GPT(ModelConfig(dim=64, layers=1, heads=2, ffn=96), 64, recipe, torch.bfloat16)
        torch.nn.init.normal_(self.gpt.head.weight, std=0.1)  # at zero it would give no gradient

    def forward(self, tokens):
        return self.gpt.loss(tokens, tokens)[0]


class Attention(torch.nn.Module):
    """On the recipe of an autocast, with a core that is quantized and computed again in backward."""

    def __init__(self, recipe):
        super().__init__()
        self.attention = MultiheadAttention(64, 2, name="l", recipe="bf16")
        self.recipe = recipe

    def forward(self, x):
        with autocast(recipe=self.recipe):
            return self.attention(x, checkpoint_core_attention=True)


class Core(torch.nn.Module):
    """Attention of one tensor to itself, in float32."""

    def __init__(self, recipe):
        super().__init__()
        self.core = DotProductAttention(name="l", recipe=recipe, dtype=torch.float32)

    def forward(self, x):
        return self.core(*[x.view(2, 32, 2, 32).transpose(1, 2)] * 3, is_causal=True)


def recomputed(recipe):
    layer = TransformerLayer(64, 96, 2, name="l", recipe=recipe)
    layer.recompute = "layer"
    return layer


DPA = {"qkv": "fp8_current", "s": "fp8_current", "do": "fp8_current+e5m2", "dp": "fp8_current+e5m2"}
MODULES = {
    "linear": lambda recipe: Linear(K, N, name="l", recipe=recipe),
    "grouped": lambda recipe: GroupedLinear(2, K, N, name="l", recipe=recipe),
    "layer": lambda recipe: TransformerLayer(64, 96, 2, name="l", recipe=recipe),
    "recomputed": recomputed,
    "attention": Attention,
    "model": Model,
    "biases": lambda recipe: Linear(K, N, name="l", recipe=recipe, bias=True),
    "float32": Core,
}
WIDTHS = {"linear": K, "grouped": K, "layer": 64, "recomputed": 64, "attention": 64, "biases": K, "float32": 64}
CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_gpu(*cases):
    """Cases whose last value is a GPU: tracing takes seconds, and other cases have these on a CPU."""
    return [pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in cases]


def results(module, call, kind, device, step, **options):
    """Output and gradients of one step, whose input is drawn for it."""
    module.zero_grad()
    if kind == "model":
        x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step)).to(device)
    else:
        x = draw("normal", 64, WIDTHS[kind]).view(2, 32, -1).float().to(device).requires_grad_()
    with quantization(seed=1, step=step, **options):
        y = call(x, [40, 24]) if kind == "grouped" else call(x)
        y.float().square().sum().backward()
    return [y.detach(), *([] if x.grad is None else [x.grad]), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "device"), [("linear", RANDOM, "cpu"), *on_gpu(["linear", RANDOM], ["layer", HYBRID])]
)
def test_one_graph_without_a_break_serves_every_step(device, kind, text):
    """The step is an input of it: random bits are those of the step."""
    check_one_graph(device, kind, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"),
    [("grouped", "nvfp4+sr"), ("recomputed", "nvfp4+sr"), ("attention", HYBRID), ("model", "nvfp4+sr")],
)
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_experts_scopes_and_whole_models_are_one_graph_too(device, kind, text):
    check_one_graph(device, kind, text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["biases", "float32"])
def test_what_a_forward_changes_last_has_gradients(kind):
    """Biases are added in place, and attention in float32 rounds nothing; torch 2.11 made zeros of these gradients."""
    check_one_graph("cpu", kind, "nvfp4")


def check_one_graph(device, kind, text, *, backend="aot_eager", tolerance=0.0):
    """tolerance: of the norm of each tensor's difference, over that of the tensor; 0: to the byte."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    sections = {"linear": text, "grouped_linear": text} | ({"dpa": DPA} if kind in ("attention", "float32") else {})
    module = MODULES[kind](Recipe.from_config(sections)).to(device)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for step in (1, 2, 3):
        eager, traced = (results(module, call, kind, device, step) for call in (module, compiled))
        for expected, got in zip(eager, traced, strict=True):
            assert expected.any()
            if tolerance:
                assert (got - expected).float().norm() <= tolerance * expected.float().norm()
            else:
                assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("text", "device"), [(RANDOM, "cpu"), *on_gpu(["bf16"], [RANDOM])])
def test_experts_are_traced_before_they_were_called(device, text):
    """The trace finds nothing that an eager call has worked out, and leaves nothing behind."""
    torch.compiler.reset()
    torch.manual_seed(0)
    cold = MODULES["grouped"](Recipe.from_config({"linear": text, "grouped_linear": text})).to(device)
    warm = copy.deepcopy(cold)
    traced = results(cold, torch.compile(cold, backend="aot_eager", fullgraph=True), "grouped", device, 1)
    assert all(map(torch.equal, traced, results(warm, warm, "grouped", device, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_weights_that_are_held_are_multiplied_between_graphs(device, kind):
    runs = []
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        with quantized_model_init(), quantization(seed=0, step=0):
            module = MODULES[kind](Recipe.from_config({"linear": HYBRID, "grouped_linear": HYBRID})).to(device)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        runs.append([tensor for step in (1, 2) for tensor in results(module, call, kind, device, step)])
    assert all(map(torch.equal, *runs))
    assert counters["graph_break"] and all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.mark.slow
def test_what_a_gpu_runs_is_traced_on_any_machine(monkeypatch):
    """A trace needs shapes alone; what it runs at last has no kernel here."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hqsweep.") and hasattr(module, "use_kernels"):
            monkeypatch.setattr(module, "use_kernels", lambda x: True)
    torch.compiler.reset()
    operators = []

    def noted(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    module = MODULES["layer"](Recipe.from_config({"linear": RANDOM}))
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=noted, bw_compiler=noted), fullgraph=True)
    with quantization(seed=1, step=1), pytest.raises(NotImplementedError, match="hqsweep::norm"):
        compiled(torch.zeros(2, 32, 64, requires_grad=True))
    assert {"hqsweep.norm.default", "hqsweep.quantize.default"} <= set(operators)


@pytest.mark.slow
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_the_default_backend_leaves_out_no_rounding_of_operands(device):
    """TorchInductor keeps what it fuses in float32; what is quantized and multiplied is rounded all the same."""
    check_one_graph(device, "linear", "bf16", backend="inductor")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["grouped", "layer", "model"])
@pytest.mark.parametrize("text", [PLAIN, RANDOM])
def test_the_default_backend_takes_what_a_gpu_runs(kind, text):
    """It adds up norms and the like, which it fuses itself, in another order, which moves a code here and there."""
    check_one_graph("cuda", kind, text, backend="inductor", tolerance=0.0 if kind == "grouped" else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "device"), [("linear", "cpu"), *on_gpu(["linear"], ["grouped"])])
def test_a_graph_takes_the_step_from_a_counter(device, kind):
    torch.compiler.reset()
    counters.clear()
    module = MODULES[kind](Recipe.from_config({"linear": "nvfp4+sr", "grouped_linear": "nvfp4+sr"})).to(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    for step in (1, 2, 3):
        counter.fill_(step)
        expected = results(module, module, kind, device, step)
        got = results(module, compiled, kind, device, step, counter=counter)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_trace_keeps_no_operands_of_weights():
    """Nobody could say of a graph's operands whether they are still those of the weight."""
    torch.compiler.reset()
    module = MODULES["linear"](Recipe.from_config({"linear": "mxfp8"}))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    first = results(module, compiled, "linear", "cpu", 1, cache_weights=True)[0]
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(results(module, compiled, "linear", "cpu", 1, cache_weights=True)[0], 2 * first)
    assert len(module.workspace) == 0


class Block(torch.nn.Module):
    """x plus two linears, named after a layer."""

    def __init__(self, layer, text):
        super().__init__()
        self.up, self.down = (Linear(K, K, name=f"layers.{layer}.{name}", recipe=text) for name in ("up", "down"))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_one_graph_serves_all_blocks_that_are_compiled_one_by_one(device):
    """Names are no part of it, and each block draws its own random bits."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block(layer, RANDOM) for layer in range(3))).to(device)
    compiled = torch.nn.Sequential(*(torch.compile(b, backend="aot_eager", fullgraph=True) for b in blocks))
    for step, microbatch in ((1, 0), (2, 0), (2, 1)):
        options = {"microbatch": microbatch}
        expected, got = (results(blocks, call, "linear", device, step, **options) for call in (blocks, compiled))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert counters["stats"]["unique_graphs"] == 2  # one for each microbatch


@pytest.mark.slow
def test_a_trace_that_needs_a_name_has_it():
    """For a quantizer of somebody else, a boundary, or a microbatch whose numbers are not kept."""
    torch.compiler.reset()
    module = Linear(K, N, name="l", recipe="nvfp4+sr")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected, got = (results(module, call, "linear", "cpu", 1, microbatch=9) for call in (module, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.slow
def test_one_graph_serves_grouped_linears_of_other_names():
    """Where no bits are drawn, which are keyed by names."""
    torch.compiler.reset()
    counters.clear()
    for layer in range(2):
        module = GroupedLinear(2, K, N, name=f"layers.{layer}", recipe="mxfp8")
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        expected, got = (results(module, call, "grouped", "cpu", 1) for call in (compiled, module))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


class Pair(torch.nn.Module):
    """Two linears, one behind the other; torch.compile has to bring what both read from one to the next."""

    def __init__(self, recipe):
        super().__init__()
        self.one = Linear(64, 64, name="one", recipe=recipe, bias=True)
        self.two = Linear(64, 64, name="two", recipe=recipe)

    def forward(self, x):
        return self.two(self.one(x))


@pytest.mark.slow
@pytest.mark.parametrize(("text", "marked"), [("fp8_current", True), ("nvfp4", False)])
def test_rows_that_torch_compile_does_not_know(text, marked):
    """mark_dynamic, and dynamic=True: also of formats with an amax of the tensor."""
    torch.compiler.reset()
    torch.manual_seed(0)
    module, results = Pair(text), []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=None if marked else True)):
        results.append([])
        for rows in (64, 96):
            x = draw("normal", rows, 64, rows).requires_grad_(not marked)
            if marked and call is not module:
                torch._dynamo.mark_dynamic(x, 0)
            module.zero_grad()
            with quantization(step=1):
                y = call(x)
                y.backward(draw("normal", rows, 64))
            results[-1] += [y.detach(), *([] if marked else [x.grad]), *gradients(module).values()]
    assert all(map(torch.equal, *results))
