"""The two schedules of a linear, alone and over ranks, have one arithmetic: a group of one rank has the same bytes."""

from types import SimpleNamespace

import pytest
import torch

from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Linear, LinearOptions, Probe, quantization
from hqsweep.parallel.shared.experts import SharedExperts
from hqsweep.parallel.shared.linear import TensorParallel

GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
RECIPES = ("bf16", "mxfp8", "nvfp4|mxfp8", "fp8_current", "nvfp4+sr")
RANKS = {mode: lambda mode=mode: TensorParallel(group=GROUP, mode=mode) for mode in ("column", "row")}


def results(module, x, dy, *arguments, probe=None):
    """y, dx and the gradients of the parameters, in one step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with quantization(seed=1, step=1, probe=probe):
        y = module(x, *arguments)
        y.backward(dy)
    own = {name: p.grad if p.grad is not None else p.main_grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | {name: gradient.clone() for name, gradient in own.items()}


def differences(one, other):
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("mode", RANKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_of_one_rank_has_the_bytes_of_one_alone(recipe, mode):
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 96).bfloat16()
    module = Linear(128, 96, name="l", recipe=recipe, bias=mode == "column")
    alone = results(module, x, dy)
    module.parallel = RANKS[mode]()
    assert differences(alone, results(module, x, dy)) == []


@pytest.mark.parametrize("options", [{"save_original_input": True}, {"fuse_wgrad_accumulation": True}])
def test_what_is_saved_and_where_gradients_go_are_the_same(options):
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 96).bfloat16()
    module = Linear(128, 96, name="l", recipe="mxfp8", options=LinearOptions(**options))
    module.weight.main_grad = torch.zeros(96, 128)
    alone = results(module, x, dy)
    module.weight.main_grad.zero_()
    module.parallel = RANKS["column"]()
    assert differences(alone, results(module, x, dy)) == []


def test_a_probe_sees_the_same():
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 96).bfloat16()
    module, probes = Linear(128, 96, name="l", recipe="mxfp8"), [Probe(0), Probe(0)]
    alone = results(module, x, dy, probe=probes[0])
    module.parallel = RANKS["row"]()
    assert differences(alone, results(module, x, dy, probe=probes[1])) == []
    assert len(probes[0].rows) > 6 and probes[0].rows == probes[1].rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_of_one_rank_have_the_bytes_of_experts_alone(recipe):
    x, dy, splits = torch.randn(96, 64).bfloat16(), torch.randn(96, 32).bfloat16(), [32, 0, 64]
    options = GroupedLinearOptions(single_grouped_weight=True)
    module = GroupedLinear(3, 64, 32, name="g", recipe=recipe, options=options)
    alone = results(module, x, dy, splits)
    module.parallel = SharedExperts()
    assert differences(alone, results(module, x, dy, splits)) == []
    module.parallel = SharedExperts(mean_over=4)
    averaged = results(module, x, dy, splits)
    assert differences(alone, averaged) == ["weight"] and torch.equal(alone["weight"], 4 * averaged["weight"])
