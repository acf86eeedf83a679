"""Checkpoints that an earlier version wrote load, and the step after gives the bytes that it gave there."""

from pathlib import Path

import pytest
import torch

from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Linear, quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.quant import Recipe

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"
FILES = sorted(path.stem for path in FOLDER.glob("*.pt"))
LINEARS = {
    "mxfp8": "mxfp8",
    "nvfp4_mxfp8": "nvfp4|mxfp8@rowwise_dequantized",
    "nvfp4": {"input": "nvfp4+rht+sr", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"},
    "fp8_delayed": "fp8_delayed",
}
"""Case, as a file's name has it -> the recipe of its linears."""


def x(seed):
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def module_of(name):
    """The module that a file is of, with other weights, and the arguments of its call after x."""
    kind, _, case = name.partition("_")
    case, single = case.removesuffix("_single"), case.endswith("_single")
    case, held = case.removesuffix("_held"), case.endswith("_held")
    with quantized_model_init(enabled=held), quantization(seed=1):
        if kind == "linear":
            return Linear(64, 64, name="l", recipe=LINEARS[case], bias=True), ()
        recipe = Recipe.from_config({"linear": "bf16", "grouped_linear": LINEARS[case]})
        options = GroupedLinearOptions(bias=True, single_grouped_weight=single)
        module = GroupedLinear(2, 64, 64, name="g", recipe=recipe, options=options)
    return module, ([32, 32],)


def test_there_are_checkpoints_of_both_modules():
    assert {name.partition("_")[0] for name in FILES} == {"linear", "grouped"}


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_of_an_earlier_version_goes_on_to_the_bit(name):
    checkpoint = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    module, splits = module_of(name)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    with quantization(seed=1, step=3):
        y = module(x(3), *splits)
        y.float().square().mean().backward()
    following = {"output": y.detach()}
    if splits == ():
        following["bias_grad"] = module.bias.grad
    assert set(following) == set(checkpoint["next"])
    for part, tensor in following.items():
        assert torch.equal(tensor, checkpoint["next"][part]), part
    optimizer.step()


@pytest.mark.parametrize("name", [name for name in FILES if "grouped" in name])
def test_a_checkpoint_of_one_weight_for_all_experts_loads_into_one_for_each(name):
    checkpoint = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    other = name.removesuffix("_single") if name.endswith("_single") else f"{name}_single"
    module, splits = module_of(other)
    module.load_state_dict(checkpoint["model"])
    with quantization(seed=1, step=3):
        assert torch.equal(module(x(3), *splits), checkpoint["next"]["output"])
