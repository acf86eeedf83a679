"""A user's own CUDA graphs: a step that was captured once draws the bits of every step, which a counter says."""

import pytest
import torch
from torch._dynamo.utils import counters

from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, TransformerLayer, quantization
from hqsweep.recipe import Recipe

pytestmark = pytest.mark.gpu
STEPS = (1, 2, 3)
RECIPE = Recipe.from_config({"linear": "nvfp4+sr", "grouped_linear": "nvfp4+sr"})


def layer():
    torch.manual_seed(0)
    return TransformerLayer(64, 96, 2, name="l", recipe=RECIPE).cuda()


def experts():
    torch.manual_seed(0)
    return GroupedLinear(2, 64, 96, name="l", recipe=RECIPE).cuda()


def drawn(step):
    return draw("normal", 64, 64, step).view(2, 32, 64).float().cuda()


def trained(module, x, call):
    """Output and gradients of a step; call: what computes the output."""
    module.zero_grad()
    x.grad = None
    y = call(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


def expected(module, call, step):
    with quantization(seed=1, step=step):
        return [tensor.detach().clone() for tensor in trained(module, drawn(step).requires_grad_(), call)]


@pytest.fixture
def counter():
    return torch.zeros(1, dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("kind", ["layer", "experts", "experts of a device"])
def test_a_captured_step_is_every_step(kind, counter):
    module = layer() if kind == "layer" else experts()
    splits = [40, 24] if kind == "experts" else torch.tensor([40, 24], device="cuda")
    call = module if kind == "layer" else lambda x: module(x, splits)
    x = drawn(0).requires_grad_()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with quantization(seed=1, counter=counter):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            trained(module, x, call)
        torch.cuda.current_stream().wait_stream(side)
        module.zero_grad()
        x.grad = None
        with torch.cuda.graph(graph):
            y = call(x)
            y.float().square().sum().backward()
    static = [y, x.grad, *(p.grad for p in module.parameters())]
    for step in STEPS:
        counter.fill_(step)
        with torch.no_grad():
            x.copy_(drawn(step))
        graph.replay()
        got = [tensor.detach().clone() for tensor in static]
        gradients = [p.grad for p in module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(got, expected(module, call, step), strict=True))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient


def test_graphed_callables_draw_by_the_counter(counter):
    module, plain = layer(), layer()
    with quantization(seed=1, counter=counter):
        graphed = torch.cuda.make_graphed_callables(module, (drawn(0).requires_grad_(),))
    for step in STEPS:
        counter.fill_(step)
        got = trained(graphed, drawn(step).requires_grad_(), graphed)
        assert all(torch.equal(a, b) for a, b in zip(got, expected(plain, plain, step), strict=True))


@pytest.mark.slow
def test_reduce_overhead_records_one_graph(counter):
    """TorchInductor's CUDA graphs: an int of the step would be another graph, a counter is not."""
    torch.compiler.reset()
    counters.clear()
    module = layer()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for step in (*STEPS, 4, 5):
        counter.fill_(step)
        torch.compiler.cudagraph_mark_step_begin()
        with quantization(seed=1, step=step, counter=counter):
            got = [tensor.detach().clone() for tensor in trained(module, drawn(step).requires_grad_(), compiled)]
        for tensor, eager in zip(got, expected(module, module, step), strict=True):
            assert (tensor - eager).float().norm() <= 0.05 * eager.float().norm()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
