"""Modules that hand on (x, branch): the bits are those of sums between calls, and hooks see every call as before."""

import pytest
import torch

from hqsweep.nn import MoELayer, MoELayerOptions, TransformerLayer, TransformerOptions
from hqsweep.nn.core.residual import add_branch
from hqsweep.nn.norm_embedding import Norm
from hqsweep.recipe import Recipe

MXFP8 = Recipe.from_config({"linear": "mxfp8"})
B, T, D, H = 2, 32, 64, 2


def layer_of(kind):
    torch.manual_seed(0)
    if kind == "dense":
        return TransformerLayer(D, 96, H, name="l", recipe=MXFP8, options=TransformerOptions(normalization="LayerNorm"))
    options = MoELayerOptions(experts=4, top_k=2, shared_expert=True)
    return MoELayer(D, 64, H, name="l", recipe=MXFP8, options=options)


def results(layer, call, *inputs):
    """What `call` gives of copies of the inputs, and all gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    layer.zero_grad()
    y = call(*inputs)
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [y.detach(), *(x.grad for x in inputs), *(p.grad.clone() for p in layer.parameters())]


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("observed", [(), ("attn",), ("mlp",), ("attn.qkv", "attn.proj"), ("",)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_layer_of_x_and_branch_is_the_layer_of_their_sum(kind, observed):
    layer, calls = layer_of(kind), []
    for name in observed:
        layer.get_submodule(name).register_forward_hook(lambda module, args, out: calls.append(first(out).shape))
    x, branch = torch.randn(B, T, D), torch.randn(B, T, D).bfloat16()
    expected = results(layer, lambda x, branch: first(layer(x + branch.float())), x, branch)
    seen = len(calls)
    actual = results(layer, lambda x, branch: add_branch(*layer.residual(x, branch)[:2]), x, branch)
    assert len(calls) == 2 * seen == 2 * len(observed)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "name"), [("dense", "mlp"), ("dense", "attn.qkv"), ("experts", "attn"), ("dense", "")]
)
def test_a_forward_of_a_derived_class_is_called(kind, name):
    """As a user writes one: what stands beside the forward of hqsweep's own class knows nothing of it."""
    layer, calls = layer_of(kind), []
    module = layer.get_submodule(name)

    def forward(self, *args):
        calls.append(args)
        return type(module).__mro__[1].forward(self, *args)

    module.__class__ = type("Derived", (type(module),), {"forward": forward})
    x, branch = torch.randn(B, T, D), torch.randn(B, T, D).bfloat16()
    add_branch(*layer.residual(x, branch)[:2])
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_branch_is_rounded_to_the_stream_and_the_norm_to_what_is_asked(dtype):
    norm = Norm(D, name="n", recipe=MXFP8)
    x, branch = torch.randn(3, D).to(dtype), torch.randn(3, D)
    total, h = norm.added(x, branch, torch.bfloat16)
    assert torch.equal(total, x + branch.to(dtype)) and total.dtype == dtype
    assert torch.equal(h, norm(x + branch.to(dtype)).bfloat16()) and h.dtype == torch.bfloat16
    total, h = norm.added(x, None)
    assert total is x and torch.equal(h, norm(x))
