"""Products of modules under torch.autocast, which changes no bit, and second derivatives, which are refused."""

from contextlib import nullcontext

import pytest
import torch
from cases import HIGH, PLAIN, bare, first

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import (
    DotProductAttention,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    LayerNormMoE,
    Linear,
    MoEOptions,
    TransformerLayer,
)
from hqsweep.recipe import Recipe

DIM = 64
MIXED = {"input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}
RHT = {"input": "nvfp4+rht", "weight": "nvfp4", "grad_output": "nvfp4+rht"}
MODULES = {
    "Linear": lambda recipe: Linear(DIM, 96, name="m", recipe=recipe, bias=True),
    "GroupedLinear": lambda recipe: GroupedLinear(2, DIM, 96, name="m", recipe=recipe),
    "LayerNormLinear": lambda recipe: LayerNormLinear(DIM, 96, name="m", recipe=recipe),
    "TransformerLayer": lambda recipe: TransformerLayer(DIM, 96, 2, name="m", recipe=recipe),
    "LayerNormMoE": lambda recipe: LayerNormMoE(
        DIM, 96, name="m", recipe=recipe, options=MoEOptions(experts=4, top_k=2)
    ),
}


def run(name, recipe, forward=nullcontext, backward=nullcontext):
    """Output and gradients of a module of fixed weights."""
    torch.manual_seed(0)
    module = MODULES[name](recipe)
    x = draw("normal", 64, DIM).float().view(2, 32, DIM).requires_grad_()
    with forward():
        y = module(x, [24, 40]) if name == "GroupedLinear" else module(x)
    y = y[0] if isinstance(y, tuple) else y
    with backward():
        y.backward(draw("normal", y.numel(), 1, 1).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def assert_the_same(results, expected):
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype and torch.equal(result, other)


@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
@pytest.mark.parametrize("recipe", [HIGH[0], PLAIN, first(high_precision=False, fits_bf16=False), MIXED, RHT], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_torchs_autocast_changes_no_bit(name, recipe, inside):
    forward, backward = (autocast if inside in (part, "both") else nullcontext for part in ("forward", "backward"))
    assert_the_same(run(name, recipe, forward, backward), run(name, recipe))


@pytest.mark.parametrize("dpa", ["fp32", "mxfp8"])
def test_torchs_autocast_changes_no_bit_of_attention(dpa):
    results = []
    for forward, backward in ((nullcontext, nullcontext), (autocast, nullcontext), (autocast, autocast)):
        module = DotProductAttention(name="m", recipe=bare(dpa), dtype=torch.float32)
        q, k, v = (draw("normal", 128, 32, seed).float().view(2, 2, 32, 32).requires_grad_() for seed in range(3))
        with forward():
            o = module(q=q, k=k, v=v, is_causal=True)
        with backward():
            o.backward(draw("normal", 128, 32, 3).float().view(o.shape))
        results.append([o.detach(), q.grad, k.grad, v.grad])
    expected, *others = results
    for other in others:
        assert_the_same(other, expected)


@pytest.mark.parametrize("recipe", [HIGH[0], PLAIN])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_gradients_are_refused(name, recipe):
    module, x = MODULES[name](recipe), draw("normal", 64, DIM).float().view(2, 32, DIM).requires_grad_()
    y = module(x, [24, 40]) if name == "GroupedLinear" else module(x)
    y = y[0] if isinstance(y, tuple) else y
    with pytest.raises(UserError, match=r"m\S*: create_graph=True asks for gradients of gradients; a quantized"):
        torch.autograd.grad(y.float().tanh().sum(), x, create_graph=True)


def test_gradients_of_gradients_of_attention_are_refused():
    section = Recipe.from_config({"linear": "bf16", "dpa": "mxfp8"})
    q = draw("normal", 128, 32).float().view(2, 2, 32, 32).requires_grad_()
    o = DotProductAttention(name="m.dpa", recipe=section)(q, q, q)
    with pytest.raises(UserError, match=r"m.dpa: create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(o.float().square().sum(), q, create_graph=True)


BUILD = {
    "converted": lambda: converted_linear(),
    "linear": lambda: Linear(64, 64, name="layer", recipe="mxfp8"),
    "norm and linear": lambda: LayerNormLinear(64, 64, name="layer", recipe="mxfp8"),
    "mlp": lambda: LayerNormMLP(64, 96, name="layer", recipe="mxfp8"),
    "layer": lambda: TransformerLayer(64, 96, 2, name="layer", recipe="mxfp8"),
}


def converted_linear():
    module = torch.nn.Sequential()
    module.add_module("layer", torch.nn.Linear(64, 64))
    hqsweep.convert(module, "mxfp8")
    return module


def dual(module, x):
    with torch.autograd.forward_ad.dual_level():
        return module(torch.autograd.forward_ad.make_dual(x, x))


def batched(module, x):
    x = x.clone().requires_grad_()
    y = module(x).float().flatten()[:3]
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


TRANSFORMS = {
    "grad": lambda module, x: torch.func.grad(lambda x: module(x).float().sum())(x),
    "vjp": lambda module, x: torch.func.vjp(module, x),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (x,)),
    "vmap": lambda module, x: torch.vmap(module)(torch.stack([x, x])),
    "jacrev": lambda module, x: torch.func.jacrev(lambda x: module(x).float().sum())(x),
    "forward AD": dual,
    "is_grads_batched": batched,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("build", BUILD)
def test_what_looks_into_products_is_refused_by_name(build, transform):
    x = torch.randn(1, 32, 64)
    with pytest.raises(UserError, match=r"^layer.*: torch.func \(grad, vjp, jvp, vmap, jacrev\).* revert the model"):
        TRANSFORMS[transform](BUILD[build](), x if build == "converted" else x.bfloat16())
