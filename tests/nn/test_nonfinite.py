"""NaN and inf in modules: each tensor's slot is named, on whatever way it is quantized; arithmetic stays."""

import math
import warnings

import pytest
import torch
from torch import nn

import hqsweep as hq
from hqsweep.nn import GroupedLinear, Linear, quantization, quantized_model_init
from hqsweep.nn.core.context import recomputed

INF, NAN = math.inf, math.nan
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def anew():
    hq.nonfinite(forget=True)
    yield
    hq.nonfinite(forget=True)


def slots(kind="nan"):
    return {seen.slot for seen in hq.nonfinite(forget=True) if seen.kind == kind}


def both(*tensors):
    return {f"{tensor}.{direction}" for tensor in tensors for direction in ("rowwise", "columnwise")}


def step(module, x, dy=None, **call):
    """Forward and backward, without warnings; returns y."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with quantization(step=1, **call):
            y = module(x.requires_grad_())
        y.backward(torch.ones_like(y) if dy is None else dy)
    return y


def spoiled(*shape, value=NAN, device="cpu"):
    x = torch.randn(*shape, device=device)
    x.view(-1)[5] = value
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp6_e3m2", "fp8_block"])
def test_each_tensor_of_a_linear_has_its_slot(recipe, device):
    module = Linear(64, 64, name="layers.3.fc2", recipe=recipe, dtype=torch.float32).to(device)
    x = torch.randn(64, 64, device=device)
    assert step(module, x).isfinite().all() and slots() == set()
    y = step(module, spoiled(64, 64, device=device))
    assert slots() == both("layers.3.fc2.input") and bool(y.isfinite().all()) == (recipe != "fp8_block")
    step(module, x, spoiled(64, 64, device=device))
    assert slots() == both("layers.3.fc2.grad_output")
    with torch.no_grad():
        module.weight[0, 7] = NAN
    step(module, x)
    assert slots() == both("layers.3.fc2.weight")


@pytest.mark.parametrize("recipe", ["bf16|nvfp4", "nvfp4|bf16", "nvfp4|mxfp8@rowwise_dequantized"])
def test_the_direction_that_has_no_nan_is_the_one_that_lost_it(recipe):
    module = Linear(64, 64, name="a", recipe={"input": recipe, "weight": recipe, "grad_output": recipe})
    step(module, spoiled(64, 64))
    lost = {seen.slot for seen in hq.nonfinite() if seen.lost}
    assert lost == {"a.input.columnwise" if recipe.startswith("bf16") else "a.input.rowwise"}


@pytest.mark.parametrize("device", DEVICES)
def test_experts_and_held_weights(device):
    module = GroupedLinear(2, 64, 64, name="moe.fc1", recipe="nvfp4", dtype=torch.float32).to(device)
    x = spoiled(64, 64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(x.requires_grad_(), [32, 32]).sum().backward()
    assert slots() == both("moe.fc1.input")
    with quantized_model_init():
        held = Linear(64, 64, name="held", recipe="mxfp4", dtype=torch.float32).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held.weight.data.quantize_(spoiled(64, 64, device=device))
    assert slots() in (both("held.weight"), both("a held weight"))


def test_a_call_without_gradients_a_converted_model_and_recomputation():
    model = nn.Sequential(nn.Linear(64, 64))
    hq.convert(model, "nvfp4")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"0.input.rowwise \(nvfp4\): a NaN was quantized"):
        model(spoiled(32, 64))
    assert {seen.slot for seen in hq.nonfinite(forget=True)} == {"0.input.rowwise"}
    module = Linear(64, 64, name="again", recipe="nvfp4", dtype=torch.float32)
    step(lambda x: recomputed(module, x), spoiled(64, 64))
    assert slots() == both("again.input")


@pytest.mark.slow
def test_a_compiled_module_says_that_it_is_one():
    module = Linear(64, 64, name="c", recipe="nvfp4")
    compiled = torch.compile(module, backend="aot_eager")
    compiled(torch.randn(64, 64))
    assert hq.nonfinite() == []
    with pytest.warns(RuntimeWarning, match=r"a module under torch.compile \(.*\): a NaN was quantized to a number"):
        compiled(spoiled(64, 64))
    (seen,) = hq.nonfinite()
    assert seen.lost and seen.format is None


def test_an_inf_in_a_history_is_told_with_its_slot_and_skipped_on_request():
    for recipe, told in (("fp8_delayed", True), ("fp8_delayed+skip_nonfinite", False)):
        model = nn.Sequential(nn.Linear(64, 64))
        hq.convert(model, recipe)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            errors = _error(model, bad_step=1)
        texts = [str(each.message) for each in said]
        if told:
            (text,) = texts
            assert text.startswith("0.grad_output.columnwise (fp8_delayed): its history took an amax of inf")
            assert errors > 0.9
        else:
            assert texts == [] and errors < 0.1


def _error(model, bad_step):
    """The error of the last gradient of a weight, whose own dy are 1e-5."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    for number in range(1, 8):
        x, dy = torch.randn(16, 64), torch.randn(16, 64) * 1e-5
        if number == bad_step:
            dy[0, 0] = INF
        model.zero_grad()
        linear.zero_grad()
        with quantization(step=number):
            y = model(x)
        y.backward(dy)
        linear(x).backward(dy)
    return float((model[0].weight.grad - linear.weight.grad).norm() / linear.weight.grad.norm())


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_next_step_tells():
    module = Linear(64, 64, name="gpu", recipe="nvfp4", dtype=torch.float32).cuda()
    x = spoiled(64, 64, device="cuda")
    step(module, torch.randn(64, 64, device="cuda"))  # makes the table
    hq.nonfinite(forget=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with quantization(step=1):
            module(x)
        with quantization(step=2):
            module(torch.randn(64, 64, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="gpu.input.rowwise"):
        for number in range(3, 6):
            with quantization(step=number):
                torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_replayed_graph_notes_what_comes():
    module = Linear(64, 64, name="graph", recipe="nvfp4", dtype=torch.float32).cuda()
    x = torch.randn(64, 64, device="cuda")
    for _ in range(3):
        module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        module(x)
    graph.replay()
    assert slots() == set()
    x[3, 5] = NAN
    graph.replay()
    assert "graph.input.rowwise" in slots()
