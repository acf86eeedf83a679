"""The built-in recipes are the packaged ones; each option does what TransformerEngine documents, or is refused."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import quantization, set_recipe
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import parse_recipe
from hqsweep.recipe.roles import module_roles
from hqsweep.sweep.grid.compose import load_recipe

LINEAR = module_roles("linear", "layers.0.fc")
ROLES = [*LINEAR, *module_roles("grouped_linear", "layers.0.experts")]
TWINS = {
    "delayed_scaling": DelayedScaling, "current_scaling": Float8CurrentScaling, "mxfp8": MXFP8BlockScaling,
    "float8_block_scaling": Float8BlockScaling, "nvfp4": NVFP4BlockScaling,
}  # fmt: skip
SIGNATURES = {
    DelayedScaling: "margin=0 fp8_format=HYBRID amax_history_len=1024 amax_compute_algo=max"
    " scaling_factor_compute_algo=None reduce_amax=True",
    Float8CurrentScaling: "use_power_2_scales=False fp8_format=HYBRID"
    " fp8_gemm_fprop=MMParams(use_split_accumulator=False) fp8_gemm_dgrad=MMParams(use_split_accumulator=True)"
    " fp8_gemm_wgrad=MMParams(use_split_accumulator=True)",
    MXFP8BlockScaling: "margin=0 fp8_format=E4M3",
    Float8BlockScaling: "use_f32_scales=False fp8_format=E4M3 x_block_scaling_dim=1 w_block_scaling_dim=2"
    " grad_block_scaling_dim=1 fp8_gemm_fprop=MMParams(use_split_accumulator=True)"
    " fp8_gemm_dgrad=MMParams(use_split_accumulator=True) fp8_gemm_wgrad=MMParams(use_split_accumulator=True)",
    NVFP4BlockScaling: "disable_rht=False disable_stochastic_rounding=False disable_2d_quantization=False"
    " row_scaled_activation=False nvfp4_4over6=none nvfp4_4over6_e4m3_use_256=all nvfp4_4over6_err_mode=MAE"
    " fp4_format=E2M1 fp8_format=E4M3",
}
"""Recipe -> its arguments before fp8_dpa, in TransformerEngine's order, with their defaults."""


def texts(recipe):
    """Input, weight and grad_output of a linear."""
    return [str(recipe.quantizer(role)) for role in LINEAR]


@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_is_the_packaged_one(name):
    recipe = TWINS[name]()
    assert recipe.resolve(ROLES) == parse_recipe(load_recipe(name)).resolve(ROLES)
    recipe.check_boundary(None)


@pytest.mark.parametrize("cls", SIGNATURES)
def test_arguments_have_the_order_and_defaults_of_theirs(cls):
    end = " fp8_dpa=False fp8_mha=False backward_override=None"
    end += " enable_2d_quantization=False" if cls is MXFP8BlockScaling else ""
    shown = [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]
    words = [f"{name}={value.name if isinstance(value, Format) else value}" for name, value in shown]
    assert words == (SIGNATURES[cls] + end).split(" ")
    positional = cls(*(value for _, value in shown))
    assert positional == cls() and all(getattr(positional, name) == value for name, value in shown)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (DelayedScaling(fp8_format=Format.E4M3, amax_history_len=4, amax_compute_algo="most_recent", reduce_amax=False),
         ["fp8_delayed+local_amax+history4+most_recent"] * 3),
        (Float8CurrentScaling(use_power_2_scales=True),
         ["fp8_current+pow2", "fp8_current+pow2", "fp8_current+e5m2+pow2"]),
        (Float8CurrentScaling(fp8_format=Format.E4M3), ["fp8_current"] * 3),
        (Float8CurrentScaling(backward_override="high_precision"), ["fp8_current|bf16", "fp8_current|bf16", "bf16"]),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID, margin=3), ["mxfp8", "mxfp8", "mxfp8+e5m2"]),
        (MXFP8BlockScaling(enable_2d_quantization=True), ["mxfp8", "mxfp8+2d", "mxfp8"]),
        (MXFP8BlockScaling(backward_override="dequantized"),
         ["mxfp8|bf16@rowwise_dequantized", "mxfp8|bf16@rowwise_dequantized", "bf16"]),
        (Float8BlockScaling(use_f32_scales=True), ["fp8_block+fp32_scale", "fp8_block+2d+fp32_scale",
                                                   "fp8_block+fp32_scale"]),
        (Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2, fp8_format=Format.HYBRID),
         ["fp8_block", "fp8_block", "fp8_block+e5m2+2d"]),
        (NVFP4BlockScaling(disable_rht=True), ["nvfp4", "nvfp4+2d", "nvfp4+sr"]),
        (NVFP4BlockScaling(disable_stochastic_rounding=True), ["nvfp4+rht", "nvfp4+2d", "nvfp4+rht"]),
        (NVFP4BlockScaling(disable_2d_quantization=True), ["nvfp4+rht", "nvfp4", "nvfp4+rht+sr"]),
        (NVFP4BlockScaling(nvfp4_4over6="weights"), ["nvfp4+rht", "nvfp4+2d+4over6", "nvfp4+rht+sr"]),
        (NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="activations", nvfp4_4over6_err_mode="MSE",
                           disable_rht=True), ["nvfp4+4over6+mse", "nvfp4+2d+4over6+mse+max448", "nvfp4+sr"]),
        (NVFP4BlockScaling(nvfp4_4over6="activations", nvfp4_4over6_e4m3_use_256="none", disable_rht=True),
         ["nvfp4+4over6+max448", "nvfp4+2d", "nvfp4+sr"]),
        (NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True, backward_override="dequantized"),
         ["nvfp4+row_scaled|bf16@rowwise_dequantized", "nvfp4+2d|bf16@rowwise_dequantized", "bf16"]),
        (NVFP4BlockScaling(backward_override="high_precision"), ["nvfp4|bf16", "nvfp4+2d|bf16", "bf16"]),
    ],
    ids=str,
)  # fmt: skip
def test_options_reach_the_formats_of_tensors(recipe, expected):
    assert texts(recipe) == [str(HybridQuantizer.parse(text)) for text in expected]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(margin=1), "DelayedScaling: margin=1 has no counterpart here"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "fp8_format is Format.E5M2; it takes Format.E4M3 or"),
        (lambda: DelayedScaling(amax_compute_algo=max), "amax_compute_algo is a builtin_function"),
        (lambda: DelayedScaling(scaling_factor_compute_algo=max), "scaling_factor_compute_algo=.* has no counterpart"),
        (lambda: DelayedScaling(backward_override="dequantized"), "backward_override is 'dequantized'; it takes None"),
        (lambda: Float8CurrentScaling(fp8_dpa=True), r"fp8_dpa=True has no counterpart here; give CustomRecipe\("),
        (lambda: Float8CurrentScaling(fp8_mha=True), "Float8CurrentScaling: fp8_mha=True has no counterpart"),
        (lambda: Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False)), r"fp8_gemm_dgrad=MMParams\(use_split_acc"),
        (lambda: Float8CurrentScaling(backward_override="none"), "it takes None or high_precision or dequantized"),
        (lambda: MXFP8BlockScaling(fp8_dpa=True), "MXFP8BlockScaling: fp8_dpa=True has no counterpart"),
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), "MXFP8BlockScaling: fp8_format is Format.E5M2"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim and w_block_scaling_dim are 2"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "w_block_scaling_dim is 3; it takes 1 or 2"),
        (lambda: Float8BlockScaling(fp8_gemm_fprop=MMParams(False)), "fp8_gemm_fprop=MMParams"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), "without the Hadamard transform; give disable_rht=True"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="some"), "nvfp4_4over6 is 'some'; it takes none or weights or"),
        (lambda: NVFP4BlockScaling(row_scaled_activation=True).entered(), "disable_rht=True, and a backward_override"),
        (lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID), "fp8_format is Format.HYBRID; it takes Format.E4M3"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="max"), "nvfp4_4over6_err_mode is 'max'; it takes MAE or MSE"),
    ],
)  # fmt: skip
def test_what_would_change_a_number_and_is_not_here_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("name", TWINS)
def test_autocast_trains_with_the_bytes_of_the_packaged_recipe(name):
    x, results = draw("normal", 32, 64), []
    for recipe in (TWINS[name](), name):
        torch.manual_seed(0)
        module = compat.Linear(64, 96, name="fc", params_dtype=torch.bfloat16)
        for step in (1, 2):
            with quantization(seed=0, step=step), compat.autocast(recipe=recipe):
                y = module(x * step)
                y.float().square().mean().backward()
        results.append((y.detach(), module.weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("cls", [MXFP8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling])
def test_backward_override_computes_gradients_from_unrounded_or_decoded_operands(cls, override):
    """By products of plain tensors, for a forward pass that stays quantized."""
    torch.manual_seed(0)
    module = compat.Linear(64, 96, bias=False, params_dtype=torch.bfloat16)
    x, dy = draw("normal", 32, 64).requires_grad_(), draw("normal", 32, 96, 1)
    recipe, plain = cls(backward_override=override), cls()
    with quantization(step=1), compat.autocast(recipe=recipe):
        y = module(x)
        y.backward(dy)
    with quantization(step=1), compat.autocast(recipe=plain), torch.no_grad():
        assert torch.equal(y, module(x))
    operands = []
    for tensor, role in ((x.detach(), LINEAR[0]), (module.weight.detach(), LINEAR[1])):
        row = plain.quantizer(role).quantize(tensor, columnwise=None).rowwise
        operands.append(row.dequantize() if override == "dequantized" else tensor)
    assert torch.equal(x.grad, (dy.float() @ operands[1].float()).bfloat16())
    assert torch.equal(module.weight.grad, (dy.float().t() @ operands[0].float()).bfloat16())


def test_a_recipe_of_nvfp4_says_how_it_quantizes_each_kind_of_tensor():
    recipe = NVFP4BlockScaling(disable_2d_quantization=True)
    assert recipe.fp4_quant_fwd_inp == compat.QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == compat.QParams()
    assert recipe.fp4_quant_bwd_grad == compat.QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert NVFP4BlockScaling(disable_rht=True).fp4_quant_fwd_weight == compat.QParams(fp4_2d_quantization=True)
    with pytest.raises(AttributeError, match="has no attribute 'fp4_quant_fwd_inp'"):
        _ = MXFP8BlockScaling().fp4_quant_fwd_inp


def test_recipes_are_frozen_values():
    recipe = MXFP8BlockScaling(backward_override="dequantized")
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert twin == recipe and hash(twin) == hash(recipe) and twin.backward_override == "dequantized"
    assert dataclasses.replace(recipe, schedule=()) == recipe
    assert recipe != MXFP8BlockScaling() and repr(recipe).startswith("MXFP8BlockScaling(margin=0, ")
    with pytest.raises(UserError, match="MXFP8BlockScaling: margin cannot be assigned; build another recipe"):
        recipe.margin = 1
    recipe.margin = 0
    recipe.backward_override = "dequantized"
    assert "margin" not in vars(recipe)
    with pytest.raises(AttributeError, match="MXFP8BlockScaling has no attribute 'marign'"):
        recipe.marign  # noqa: B018
    module = compat.Linear(64, 96)
    assert set_recipe(module, recipe) == 2 and str(module.quantizers.grad_output) == "bf16"


def test_recipes_say_what_they_are():
    asked = ("delayed", "float8_current_scaling", "mxfp8", "float8_block_scaling", "nvfp4", "custom")
    recipes = [*(TWINS[name]() for name in TWINS), compat.CustomRecipe(compat.mxfp8_factory)]
    order = [0, 1, 2, 3, 4, 5]
    for index, recipe in zip(order, recipes, strict=True):
        assert [getattr(recipe, name)() for name in asked] == [position == index for position in order]
        assert recipe.float8_per_tensor_scaling() == (index < 2) and isinstance(recipe, compat.Recipe)
