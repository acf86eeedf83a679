"""What runs again within backward computes what it computed first, or is refused; and plain backward is that of its
forward, in whatever scope, order or recipe it runs."""

import gc
import os
import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.formats import inputs
from hqsweep.nn import LayerNormMLP, Linear, autocast, quantization, set_recipe
from hqsweep.nn.core.context import recomputed

HOST_CALLS = 185
SR = {"input": "nvfp4", "weight": "nvfp4", "grad_output": "nvfp4+sr"}


class Rerun(torch.autograd.Function):
    """A checkpoint of somebody else, as those of TransformerEngine, Megatron and DeepSpeed."""

    @staticmethod
    def forward(context, run_function, x):
        context.run_function = run_function
        context.save_for_backward(x)
        with torch.no_grad():
            return run_function(x)

    @staticmethod
    def backward(context, dy):
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = context.run_function(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


WAYS = {
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "not reentrant": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "somebody else's": Rerun.apply,
    "nested": lambda module, x: checkpoint(
        lambda x: checkpoint(module, x, use_reentrant=False), x, use_reentrant=False
    ),
    "nested reentrant": lambda module, x: checkpoint(
        lambda x: checkpoint(module, x, use_reentrant=True), x, use_reentrant=True
    ),
    "one in the other": lambda module, x: checkpoint(
        lambda x: checkpoint(module, x, use_reentrant=True), x, use_reentrant=False
    ),
}
SIMPLE, FEW = list(WAYS)[:3], ("autocast", "microbatch")
ways = pytest.mark.parametrize("way", WAYS)


def draw(rows, cols, seed=0):
    return inputs.draw("normal", rows, cols, seed).float()


def plain(module, x):
    return module(x)


def converted(recipe="mxfp8"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    hq.convert(model, recipe)
    return model


def own(recipe="mxfp8"):
    torch.manual_seed(0)
    return nn.Sequential(Linear(64, 64, name="first", recipe=recipe), LayerNormMLP(64, 96, name="mlp", recipe=recipe))


def step(**options):
    return lambda: quantization(**({"step": 1} | options))


def within(*contexts):
    """One context of several, that of the last the innermost."""

    def enter():
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context())
        return stack

    return enter


def recipe(name):
    return lambda: autocast(recipe=name)


def gradients(model, call, forward, backward, between=lambda model: None):
    x = draw(32, 64).requires_grad_()
    with forward():
        loss = call(model, x).float().square().mean()
    between(model)
    with backward():
        loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


OTHER = {
    "autocast": ("mxfp8", recipe("mxfp8"), recipe("nvfp4|mxfp8"), "autocast"),
    "autocast entered": ("mxfp8", nullcontext, recipe("nvfp4|mxfp8"), "autocast"),
    "autocast left": ("mxfp8", recipe("nvfp4|mxfp8"), nullcontext, "autocast"),
    "high precision": ("mxfp8", nullcontext, lambda: autocast(False), "autocast"),
    "out of high precision": ("mxfp8", lambda: autocast(False), nullcontext, "autocast"),
    "nested": ("mxfp8", within(recipe("nvfp4|mxfp8"), recipe("mxfp8")), recipe("nvfp4|mxfp8"), "autocast"),
    "microbatch": (SR, step(microbatch=0), step(microbatch=1), "quantization"),
    "step": (SR, step(), step(step=2), "quantization"),
    "seed": (SR, step(), step(seed=1), "quantization"),
    "both": (SR, within(step(), recipe("nvfp4|mxfp8")), step(step=2), "autocast"),
    "delayed": ("fp8_delayed", step(), step(step=2), "quantization"),
    "delayed under autocast": ("mxfp8", within(step(), recipe("fp8_delayed")), step(), "autocast"),
}
others = pytest.mark.parametrize("other", OTHER)


@pytest.mark.parametrize(
    ("way", "other"), [(way, other) for way in WAYS for other in (OTHER if way in SIMPLE else FEW)]
)
@pytest.mark.parametrize("build", [converted, own])
def test_another_scope_is_refused(way, other, build):
    name, forward, backward, lost = OTHER[other]
    with pytest.raises(UserError, match=rf"called within a backward pass.* outside of the {lost}\(\).*recomputed"):
        gradients(build(name), WAYS[way], forward, backward)


@others
@pytest.mark.parametrize("call", [plain, recomputed])
@pytest.mark.parametrize("build", [converted, own])
def test_plain_backward_and_ours_are_of_their_forward(call, other, build):
    name, forward, backward, _ = OTHER[other]
    expected = gradients(build(name), plain, forward, forward)
    actual = gradients(build(name), call, forward, backward)
    assert all(map(torch.equal, actual, expected))


def test_what_gives_the_same_is_no_other_scope():
    """The same recipe by another name, other random bits that nobody draws, and another cache."""
    expected = gradients(converted(), plain, nullcontext, nullcontext)
    for way in ("reentrant", "not reentrant"):
        for forward, backward in (
            (nullcontext, recipe("mxfp8")), (step(), step(step=2, seed=4)), (step(), step(cache_weights=True))
        ):  # fmt: skip
            assert all(map(torch.equal, gradients(converted(), WAYS[way], forward, backward), expected))


@ways
@pytest.mark.parametrize("to", ["nvfp4|mxfp8", "bf16", "fp8_delayed"])
def test_another_recipe_in_between_is_refused(way, to):
    for build in (converted, own):
        with pytest.raises(UserError, match=r"called within a backward pass.* outside of the recipe that"):
            gradients(build(), WAYS[way], step(), step(), lambda model: set_recipe(model, to))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_delayed", "fp8_current|fp8_delayed", "fp8_block"])
@pytest.mark.parametrize("call", [plain, recomputed])
def test_plain_backward_is_of_its_forward_when_the_recipe_has_changed(name, call):
    """Also of formats with a history, which the model has given up by then."""

    def twice(between):
        model = converted(name)
        gradients(model, plain, step(), step())
        model.zero_grad()
        return gradients(model, call, step(step=2), step(step=2), between)

    if call is recomputed:
        with pytest.raises(UserError, match="outside of the recipe"):
            twice(lambda model: set_recipe(model, "bf16"))
        return
    expected = twice(lambda model: None)
    for change in (lambda model: set_recipe(model, "bf16"), hq.revert, there_and_back(name)):
        assert all(map(torch.equal, twice(change), expected))


def there_and_back(name, times=1):
    """A change of recipe to another one and back, after which histories are new."""

    def change(model):
        for _ in range(times):
            set_recipe(model, "bf16")
            set_recipe(model, name)

    return change


def test_a_backward_whose_histories_are_gone_is_refused():
    with pytest.raises(UserError, match="comes after 5 changes of recipe, and histories are kept for 4"):
        gradients(converted("fp8_delayed"), plain, step(), step(), there_and_back("fp8_delayed", 5))


@ways
def test_a_second_run_on_new_histories_is_refused(way):
    with pytest.raises(UserError, match="outside of the recipe"):
        gradients(converted("fp8_delayed"), WAYS[way], step(), step(), there_and_back("fp8_delayed"))


@ways
def test_a_model_that_was_reverted_or_converted_in_between_is_refused(way):
    with pytest.raises(UserError, match=r"0: called within a backward pass|2: called within a backward pass"):
        gradients(converted(), WAYS[way], nullcontext, nullcontext, hq.revert)
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UserError, match=r"0: called within a backward pass.* outside of the hqsweep.convert\(\)"):
        gradients(model, WAYS[way], nullcontext, nullcontext, lambda model: hq.convert(model, "mxfp8"))


@pytest.mark.slow
def test_a_reverted_model_is_plain_again():
    """Once the passes are over that it refuses, nothing is left of them."""
    model = converted()
    gradients(model, WAYS["reentrant"], nullcontext, nullcontext)
    gc.collect()
    hq.revert(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    loss = checkpoint(converted_later := converted(), draw(8, 64).requires_grad_(), use_reentrant=True)
    hq.revert(converted_later)
    converted_later(draw(8, 64)).sum().backward()  # its own graph, which is plain
    del loss
    gc.collect()
    converted_later(draw(8, 64))
    assert not any(module._forward_pre_hooks for module in converted_later.modules())


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("name", [SR, "mxfp8"])
def test_microbatches_in_the_order_of_pipelines(way, name):
    """Three graphs are there at once, and backward of each is within the scope of its own forward."""

    def train(call, scopes):
        model, losses = converted(name), {}
        for number, forwards in ((0, True), (1, True), (2, True), (0, False), (2, False), (1, False)):
            with quantization(step=1, microbatch=scopes[number] if not forwards else number):
                if forwards:
                    losses[number] = call(model, draw(32, 64, number).requires_grad_()).square().mean()
                else:
                    losses.pop(number).backward()
        return [p.grad for p in model.parameters()]

    expected = train(plain, (0, 1, 2))
    assert all(map(torch.equal, train(WAYS[way] if way else plain, (0, 1, 2)), expected))
    if way is None:
        assert all(map(torch.equal, train(plain, (2, 0, 0)), expected))
    elif name is SR:
        with pytest.raises(UserError, match=r"outside of the quantization\(\)"):
            train(WAYS[way], (0, 2, 1))


def test_several_models_keep_apart():
    models = [converted("mxfp8"), converted("nvfp4")]
    x = draw(32, 64).requires_grad_()
    with autocast(recipe="fp8_block"):
        first = WAYS["not reentrant"](models[0], x).square().mean()
    second = WAYS["not reentrant"](models[1], x).square().mean()
    second.backward()
    with pytest.raises(UserError, match="autocast"):
        first.backward()
    with autocast(recipe="fp8_block"):
        first = WAYS["not reentrant"](models[0], x).square().mean()
        first.backward()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_autocast_of_torch_around_forward_alone(way):
    """torch.utils.checkpoint brings back that of torch."""
    cast = partial(torch.autocast, "cpu", torch.bfloat16)
    expected = gradients(converted(), plain, cast, nullcontext)
    assert all(map(torch.equal, gradients(converted(), WAYS[way], cast, nullcontext), expected))


def test_steps_of_delayed_scaling_do_not_go_back_in_backward():
    """Two graphs of two steps: the later step's backward would be told of, and scaled by, the earlier one's."""
    for call in (plain, WAYS["not reentrant"], WAYS["reentrant"]):
        model, losses = converted("fp8_delayed"), []
        for number in (1, 2):
            with quantization(step=number):
                losses.append(call(model, draw(32, 64).requires_grad_()).square().mean())
        with quantization(step=2):
            losses[1].backward()
        with quantization(step=1), pytest.raises(UserError, match="backward of step 1 comes after a call of step 2"):
            losses[0].backward()


def test_a_counter_that_was_written_since_is_another_step():
    counter = torch.ones(1, dtype=torch.int64)
    for write in (False, True):
        model, x = converted(SR), draw(32, 64).requires_grad_()
        with quantization(counter=counter):
            loss = WAYS["not reentrant"](model, x).square().mean()
            if write:
                counter.fill_(2)
                with pytest.raises(UserError, match=r"outside of the quantization\(\)"):
                    loss.backward()
            else:
                loss.backward()


def test_backward_twice_of_one_graph():
    model, x = converted(SR), draw(32, 64).requires_grad_()
    with quantization(step=1):
        loss = WAYS["not reentrant"](model, x).square().mean()
        first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with quantization(step=2), pytest.raises(UserError, match="quantization"):
        loss.backward()


def test_host_calls_of_a_linear():
    """Python functions of hqsweep that a forward and a backward call."""
    module, x = Linear(64, 96, name="layer", recipe="mxfp8"), draw(32, 64).requires_grad_()
    calls, package = [], f"{Path(hq.__file__).parent}{os.sep}"

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_name)

    dy = draw(32, 96).bfloat16()
    with quantization(step=1):
        for _ in range(2):
            module(x).backward(dy)
        sys.setprofile(count)
        try:
            module(x).backward(dy)
        finally:
            sys.setprofile(None)
    assert 100 < len(calls) <= HOST_CALLS
