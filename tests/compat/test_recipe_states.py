"""RecipeState: the quantizers of slots, by role or by place, and the buffers of delayed scaling."""

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import DelayedScalingRequest, Float8Quantizer, Format, QuantizerRole, RecipeState
from hqsweep.errors import UserError


def role(tensor_type):
    return QuantizerRole("linear", tensor_type, "fc")


def slots(recipe, mode, count, roles=None):
    return [str(q) for q in RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()]


@pytest.mark.parametrize("roles", [None, ["input", "weight", "output"], ["", "qkv", None]])
def test_slots_have_their_role_or_the_tensor_of_their_place(roles):
    roles = roles and [name if name is None else role(name) for name in roles]
    assert slots(compat.Float8BlockScaling(), "forward", 3, roles) == ["fp8_block", "fp8_block+2d", "fp8_block"]
    assert slots(compat.NVFP4BlockScaling(), "forward", 3, roles) == ["nvfp4+rht", "nvfp4+2d", "nvfp4+rht"]


@pytest.mark.parametrize("roles", [None, [role("grad_output"), role("grad_input")]])
def test_both_gradients_are_alike(roles):
    assert slots(compat.NVFP4BlockScaling(), "backward", 2, roles) == ["nvfp4+rht+sr"] * 2
    assert slots(compat.Float8CurrentScaling(), "backward", 2, roles) == ["fp8_current+e5m2"] * 2
    assert slots(compat.MXFP8BlockScaling(backward_override="dequantized"), "backward", 2, roles) == ["bf16"] * 2


def test_a_place_comes_again_after_three_slots():
    recipe = compat.MXFP8BlockScaling(enable_2d_quantization=True)
    assert slots(recipe, "forward", 5) == ["mxfp8", "mxfp8+2d", "mxfp8", "mxfp8", "mxfp8+2d"]


def test_a_custom_factory_gets_each_role_as_it_is():
    asked = []
    recipe = compat.CustomRecipe(lambda role: asked.append(role) or compat.mxfp8_factory(role))
    made = RecipeState(recipe, mode="forward", num_quantizers=2, roles=[role("input"), None]).make_quantizers()
    assert asked == [role("input"), None] and all(isinstance(each, compat.MXFP8Quantizer) for each in made)


def test_a_tensor_of_the_other_mode_stays_the_tensor():
    options = {"mode": "backward", "num_quantizers": 2, "roles": [role("input"), role("grad_input")]}
    made = RecipeState(compat.NVFP4BlockScaling(), **options).make_quantizers()
    assert [quantizer.stochastic_rounding for quantizer in made] == [False, True]


def test_row_scaled_activations_are_all_but_weights():
    recipe = compat.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    made = RecipeState(recipe, mode="forward", num_quantizers=3).make_quantizers()
    assert [quantizer.row_scaled_nvfp4 for quantizer in made] == [True, False, True]


def test_a_subclass_reads_the_role_and_the_tensor_of_a_slot():
    given = [role("weight"), QuantizerRole("dpa", "qkv"), None]
    state = RecipeState(compat.Float8BlockScaling(), mode="forward", num_quantizers=3, roles=given)
    assert state._slot_role(0) is given[0] and state._slot_role(2) == QuantizerRole()
    assert [state._slot_tensor_type(slot) for slot in range(3)] == ["weight", "weight", "output"]


def delayed_weight(role):
    return DelayedScalingRequest(amax_history_len=16) if role.tensor_type == "weight" else "fp8_current"


@pytest.mark.parametrize(
    ("recipe", "count"), [(compat.DelayedScaling(amax_history_len=16), 3), (compat.CustomRecipe(delayed_weight), 1)]
)
def test_quantizers_of_delayed_scaling_share_the_buffers_of_a_state(recipe, count):
    roles = [role("input"), role("weight"), role("output")]
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles, device="cpu")
    made = [each for each in state.make_quantizers() if isinstance(each, Float8Quantizer)]
    assert len(made) == count and state._has_delayed_scaling
    assert state.scale.tolist() == [1] * count and state.amax_history.shape == (16, count)
    made[-1](torch.full((16, 16), 3.0))
    assert state.amax_history[0, -1] == 3 and state.amax_history.count_nonzero() == 1
    state.scale[-1] = 2
    assert made[-1](torch.ones(16, 16))._scale_inv == 0.5
    assert state._inner_delayed_scaling_recipe == compat.DelayedScaling(amax_history_len=16)


@pytest.mark.parametrize(("mode", "format"), [("forward", compat.DType.kFloat8E4M3), ("backward", "e5m2")])
def test_hybrid_gradients_are_e5m2(mode, format):
    made = RecipeState(compat.DelayedScaling(), mode=mode).make_quantizers()
    assert made[0].dtype == compat.DType(format)


def test_requests_of_one_state_are_alike():
    recipe = compat.CustomRecipe(lambda role: DelayedScalingRequest(Format.E4M3 if role else Format.HYBRID))
    state = RecipeState(recipe, mode="forward", num_quantizers=2, roles=[None, role("weight")])
    with pytest.raises(UserError, match="its requests of delayed scaling differ"):
        state.make_quantizers()
    assert not RecipeState(compat.MXFP8BlockScaling(), mode="forward")._has_delayed_scaling


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "both"}, "mode is 'both'; it takes forward or backward"),
        ({"mode": "forward", "num_quantizers": 2, "roles": [None]}, "1 roles for 2 quantizers; give one for each"),
    ],
)
def test_what_a_state_does_not_take(arguments, message):
    with pytest.raises(UserError, match=message):
        RecipeState(**{"recipe": compat.MXFP8BlockScaling()} | arguments)
