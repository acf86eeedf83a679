"""Experts that a device fills up by itself, because the host does not know their splits."""

import pytest
import torch
from cases import WHOLE_BLOCKS
from support.nn.experts import EXPERTS, GPU, SECTIONS, K, N, gradients, grouped, hidden, ids

from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, quantization
from hqsweep.ops.splits import PaddedSplits
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import CustomRecipe

UNEVEN, TOKENS = (7, 0, 16, 33), 56
ROWS_IN_BF16 = {"input": "bf16|nvfp4", "weight": "bf16", "grad_output": "bf16|nvfp4"}
ROTATED = {"input": "fp8_delayed|nvfp4+rht", "weight": "fp8_delayed|nvfp4", "grad_output": "fp8_delayed|nvfp4+rht"}
KERNELS = [*WHOLE_BLOCKS, "nvfp4+row_scaled|nvfp4", "fp8_block|nvfp4", ROWS_IN_BF16, SECTIONS[0]]


@pytest.fixture(params=["loop", "kernels", "reference"])
def plan(request, monkeypatch):
    """Products of a CPU, those of a GPU, and quantization by the reference."""
    if request.param == "reference":
        for module in ("splits", "quantize.request", "quantize.dequantize"):
            monkeypatch.setattr(f"hqsweep.ops.{module}.has_kernels", lambda device: False)
    return request.param


def options_of(plan, **options):
    """Options of a grouped linear on the plans of a GPU, or of a CPU."""
    return options | {"plan_capability": GPU if plan == "kernels" else None}


def run(module, splits):
    """Outputs and gradients of two steps."""
    results = {}
    for step in (1, 2):
        module.zero_grad()
        x = draw("heavy", TOKENS, K, step).clamp(-50, 50).requires_grad_()
        with quantization(seed=1, step=step):
            y = module(x, splits)
            y.backward(torch.round(draw("normal", TOKENS, N, step) * 8))
        results |= {f"{step} {name}": g.clone() for name, g in gradients(module).items()}
        results |= {f"{step} y": y.detach(), f"{step} x": x.grad}
    return results


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.feature("H27")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantizers", [*KERNELS, ROTATED], ids=ids)
def test_a_device_fills_experts_up_as_the_host_does(plan, quantizers, single):
    """To the byte, in outputs, gradients and histories; whatever follows the last expert is not seen."""
    options = options_of(plan, single_grouped_weight=single, single_grouped_bias=single, bias=True)
    ours, theirs = (grouped(quantizers, **options).to(torch.bfloat16) for _ in range(2))
    assert_same(run(ours, hidden(UNEVEN)), run(theirs, UNEVEN))
    assert_same(ours.state_dict(), theirs.state_dict())


@pytest.mark.feature("H27")
@pytest.mark.parametrize("quantizers", KERNELS, ids=ids)
@pytest.mark.parametrize("plan", ["kernels"], indirect=True)
def test_nothing_waits_for_splits_that_are_filled_up(plan, quantizers, monkeypatch):
    module = grouped(quantizers, **options_of(plan, single_grouped_weight=True)).to(torch.bfloat16)
    expected, splits = run(module, UNEVEN), hidden(UNEVEN)
    for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, what=name: pytest.fail(f"{what} waits"))
    ours = run(module, splits)
    monkeypatch.undo()
    assert "host" not in vars(splits)
    assert_same(ours, expected)


@pytest.mark.feature("H27")
@pytest.mark.parametrize("splits", [(16, 0, 32, 8), (0, 0, 0, 56), (1, 1, 1, 53), (14, 14, 14, 14)])
def test_any_splits_have_room(splits):
    module = grouped("nvfp4")
    assert_same(run(module, hidden(splits)), run(module, splits))


def test_without_rows_nothing_is_filled_up():
    module, x = grouped("nvfp4"), torch.zeros(0, K, dtype=torch.bfloat16, requires_grad=True)
    y = module(x, hidden((0,) * EXPERTS))
    y.backward(torch.zeros(0, N, dtype=torch.bfloat16))
    assert y.shape == (0, N) and x.grad.shape == (0, K) and not any(g.any() for g in gradients(module).values())


def test_a_forward_alone_fills_nothing_up(monkeypatch):
    module, x = grouped("nvfp4"), draw("normal", TOKENS, K)
    expected = module(x, hidden(UNEVEN))
    monkeypatch.setattr("hqsweep.nn.grouped.place_rows", lambda *_: pytest.fail("rows are copied"))
    with torch.no_grad():
        assert torch.equal(module(x, hidden(UNEVEN)), expected)


def test_layers_share_what_was_found_out_about_splits():
    """fc1 and fc2 of a mixture of experts are given the same object."""
    module, splits, x = grouped("nvfp4"), hidden(UNEVEN), draw("normal", TOKENS, K)
    module(x, splits)
    padded = PaddedSplits.over(splits, 16, x.device)
    places = vars(padded)["places"]
    module(x, splits)
    assert PaddedSplits.over(splits, 16, x.device) is padded and vars(padded)["places"] is places


class Halved(HybridQuantizer):
    """A quantizer of somebody else."""

    def quantize(self, x, **options):
        return super().quantize(x * 0.5, **options)


@pytest.mark.parametrize("formats", [("mxfp8", "nvfp4+sr"), ("nvfp4+row_scaled", "mxfp4")], ids=" ".join)
def test_a_custom_quantizer_is_called_for_experts_that_are_filled_up(plan, formats):
    recipe = CustomRecipe(qfactory=lambda role: Halved(*map(parse, formats)))
    options = GroupedLinearOptions(**options_of(plan, single_grouped_weight=True))
    module = GroupedLinear(EXPERTS, K, N, name="e", recipe=recipe, options=options).to(torch.bfloat16)
    assert_same(run(module, hidden(UNEVEN)), run(module, UNEVEN))


@pytest.mark.feature("H27")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "quantizers", ["mxfp8", "fp8_current", "fp8_delayed", "nvfp4", "mxfp4", "fp8_delayed|nvfp4", SECTIONS[0]], ids=ids
)
def test_a_graph_of_a_step_serves_other_splits(quantizers):
    """Forward and backward, biases included, captured with the splits on the device; the bytes of a step without it."""
    options = {"single_grouped_weight": True, "single_grouped_bias": True, "bias": True}
    module, other = (grouped(quantizers, **options).to(torch.bfloat16).cuda() for _ in range(2))
    x = draw("normal", TOKENS, K).cuda().requires_grad_()
    dy = torch.round(draw("normal", TOKENS, N, 1) * 8).cuda()
    splits = torch.tensor(UNEVEN, dtype=torch.int32, device="cuda")
    inputs = (x, module.weight, module.bias)

    def step(module, splits, inputs):
        with quantization(seed=1, step=1):
            y = module(inputs[0], splits)
            return (y, *torch.autograd.grad(y, inputs, dy))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(module, splits, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(module, splits, inputs)
    for sizes in (UNEVEN, UNEVEN[::-1], (1, 0, 55, 0), (14, 14, 14, 14)):
        splits.copy_(torch.tensor(sizes, dtype=torch.int32))
        graph.replay()
        expected = step(other, torch.tensor(sizes, device="cuda"), (x, other.weight, other.bias))
        assert all(map(torch.equal, outputs, expected))
