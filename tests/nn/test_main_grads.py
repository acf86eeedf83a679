"""What modules with fuse_wgrad_accumulation do with weight.main_grad: as in TransformerEngine they add to it, or, where
the weight says so, overwrite it; and they tell."""

import pytest
import torch

from hqsweep.nn import GroupedLinear, Linear, linear_cross_entropy, quantization
from hqsweep.nn.core.options import GroupedLinearOptions, LinearOptions

X = torch.arange(8.0 * 32).sin().view(8, 32)


def backward_of(kind, weights):
    """A call of a module of this kind, and its backward; `weights` prepares its weights."""
    torch.manual_seed(0)
    if kind == "experts":
        options = GroupedLinearOptions(fuse_wgrad_accumulation=True)
        module = GroupedLinear(2, 32, 16, name="m", recipe="bf16", dtype=torch.float32, options=options)
        every, run = list(module.weights), lambda: module(X, [5, 3]).sum()
    else:
        options = LinearOptions(fuse_wgrad_accumulation=True)
        module = Linear(32, 16, name="m", recipe="bf16", dtype=torch.float32, options=options)
        every = [module.weight]
        targets = torch.arange(8)
        run = (lambda: linear_cross_entropy(X, module, targets, 128)) if kind == "loss" else lambda: module(X).sum()
    for weight in every:
        weight.main_grad = torch.full(weight.shape, 7.0)
        weights(weight)
    with quantization(step=1):
        run().backward()
    assert all(weight.grad is None for weight in every)
    return every


@pytest.mark.parametrize("kind", ["linear", "experts", "loss"])
def test_a_weight_may_ask_for_its_main_grad_to_be_overwritten(kind):
    added = backward_of(kind, lambda weight: None)
    overwritten = backward_of(kind, lambda weight: setattr(weight, "overwrite_main_grad", True))
    for one, other in zip(added, overwritten, strict=True):
        torch.testing.assert_close(one.main_grad, other.main_grad + 7)
        assert other.main_grad.any() and not hasattr(one, "grad_added_to_main_grad")


@pytest.mark.parametrize("kind", ["linear", "experts", "loss"])
def test_a_weight_that_asks_is_told(kind):
    for weight in backward_of(kind, lambda weight: setattr(weight, "grad_added_to_main_grad", False)):
        assert weight.grad_added_to_main_grad is True
