"""Which quantizers a recipe gives to slots, read by TransformerEngine's RecipeState."""

import pytest

from hqsweep import compat
from hqsweep.compat import QuantizerRole, RecipeState, get_align_size_for_quantization
from hqsweep.errors import UserError


def role(tensor_type):
    return QuantizerRole("linear", tensor_type, "fc")


def texts(recipe, mode, count, roles=None):
    return [str(q) for q in RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()]


@pytest.mark.parametrize("roles", [None, ["input", "weight", "output"], ["", "qkv", None]])
def test_slots_have_their_role_or_the_tensor_of_their_place(roles):
    roles = roles and [name if name is None else role(name) for name in roles]
    assert texts(compat.Float8BlockScaling(), "forward", 3, roles) == ["fp8_block", "fp8_block+2d", "fp8_block"]
    assert texts(compat.NVFP4BlockScaling(), "forward", 3, roles) == ["nvfp4+rht", "nvfp4+2d", "nvfp4+rht"]


@pytest.mark.parametrize("roles", [None, [role("grad_output"), role("grad_input")]])
def test_both_gradients_are_alike(roles):
    assert texts(compat.NVFP4BlockScaling(), "backward", 2, roles) == ["nvfp4+rht+sr"] * 2
    assert texts(compat.Float8CurrentScaling(), "backward", 2, roles) == ["fp8_current+e5m2"] * 2
    assert texts(compat.MXFP8BlockScaling(backward_override="dequantized"), "backward", 2, roles) == ["bf16"] * 2


def test_a_place_comes_again_after_three_slots():
    recipe = compat.MXFP8BlockScaling(enable_2d_quantization=True)
    assert texts(recipe, "forward", 5) == ["mxfp8", "mxfp8+2d", "mxfp8", "mxfp8", "mxfp8+2d"]


def test_a_custom_factory_gets_each_role_as_it_is():
    asked = []
    recipe = compat.CustomRecipe(lambda role: asked.append(role) or compat.mxfp8_factory(role))
    made = RecipeState(recipe, mode="forward", num_quantizers=2, roles=[role("input"), None]).make_quantizers()
    assert asked == [role("input"), None] and all(isinstance(each, compat.MXFP8Quantizer) for each in made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "both"}, "mode is 'both'; it takes forward or backward"),
        ({"mode": "forward", "num_quantizers": 2, "roles": [None]}, "1 roles for 2 quantizers; give one for each"),
        ({"mode": "forward", "recipe": compat.DelayedScaling()}, "the states of DelayedScaling belong to modules"),
    ],
)
def test_what_a_state_does_not_take(arguments, message):
    with pytest.raises(UserError, match=message):
        RecipeState(**{"recipe": compat.MXFP8BlockScaling()} | arguments)


def test_the_alignment_is_the_recipe_s():
    recipes = compat.NVFP4BlockScaling(), compat.CustomRecipe(compat.mxfp8_factory, quantization_alignment=32)
    assert [get_align_size_for_quantization(recipe) for recipe in recipes] == [128, 32]
