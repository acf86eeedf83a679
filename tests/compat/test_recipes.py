"""CustomRecipe's options, requests, and formats by TransformerEngine's names."""

import dataclasses
import pickle

import pytest

from hqsweep import compat
from hqsweep.compat import (
    CustomRecipe,
    DelayedScalingRequest,
    Format,
    QuantizerRequest,
    QuantizerRole,
    RecipeState,
    get_align_size_for_quantization,
)
from hqsweep.errors import UserError
from hqsweep.recipe.roles import module_roles

ROLES = module_roles("linear", "fc")


def attention(role):
    return "bf16" if role is None or role.module_type == "dpa" else "mxfp8"


class Own(compat.IdentityQuantizer):
    def quantize_impl(self, tensor):
        return super().quantize_impl(2 * tensor)


def texts(recipe):
    return [str(recipe.quantizer(role)) for role in ROLES]


def test_formats_know_their_largest_values():
    assert [format.value.max_fwd for format in Format] == [6, 448, 57344, 448]
    assert [format.value.max_bwd for format in Format] == [6, 448, 57344, 57344]
    assert Format.E4M3.value == (448, 448) and pickle.loads(pickle.dumps(Format.HYBRID)) is Format.HYBRID


@pytest.mark.parametrize(
    "factory", [compat.mxfp8_factory, lambda role: "mxfp8", lambda role: compat.MXFP8BlockScaling().qfactory(role)]
)
def test_backward_override_leaves_rowwise_operands_of_inputs_and_weights(factory):
    high = CustomRecipe(factory, backward_override="high_precision")
    assert texts(high) == ["mxfp8|bf16", "mxfp8|bf16", "bf16"] and high.backward_override == "high_precision"
    decoded = CustomRecipe(factory, backward_override="dequantized")
    assert texts(decoded) == ["mxfp8|bf16@rowwise_dequantized"] * 2 + ["bf16"]
    decoded.check_boundary(None)


def test_backward_override_has_the_format_of_a_row_scaled_quantizer():
    recipe = CustomRecipe(lambda role: compat.NVFP4Quantizer(row_scaled_nvfp4=True), backward_override="dequantized")
    assert texts(recipe)[0] == "nvfp4+row_scaled|bf16@rowwise_dequantized"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CustomRecipe(attention, fp8_mha=True), "CustomRecipe: fp8_mha=True has no counterpart here"),
        (lambda: CustomRecipe(attention, backward_override="bf16"), "is 'bf16'; it takes None or high"),
        (lambda: CustomRecipe(attention, fp8_dpa=True, backward_override="dequantized"), "does not reach attention"),
        (lambda: CustomRecipe(attention, quantization_alignment=0), "quantization_alignment is 0; it takes a number"),
        (lambda: texts(CustomRecipe(compat.delayed_scaling_factory, backward_override="dequantized")),
         "backward_override='dequantized' is not for fp8_delayed"),
        (lambda: texts(CustomRecipe(lambda role: Own(), backward_override="dequantized")),
         "keeps only the format of Own, which quantizes by a method of its own"),
        (lambda: texts(CustomRecipe(lambda role: QuantizerRequest())), "QuantizerRequest: a request has no quantizer"),
        (lambda: texts(CustomRecipe(lambda role: None, backward_override="dequantized")), "returned None"),
    ],
)  # fmt: skip
def test_what_would_change_a_number_and_is_not_here_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_recipes_of_the_same_options_are_equal_and_pickled_with_them():
    made = [CustomRecipe(compat.mxfp8_factory, backward_override=o) for o in (None, "dequantized", "dequantized")]
    assert dataclasses.replace(made[1], schedule=()).backward_override == "dequantized"
    assert dataclasses.replace(made[1], schedule=()) == made[1] == made[2] and made[0] != made[1]
    twin = pickle.loads(pickle.dumps(CustomRecipe(compat.mxfp8_factory, Format.E4M3, quantization_alignment=32)))
    assert (twin.fp8_format, twin.quantization_alignment, type(twin)) == (Format.E4M3, 32, CustomRecipe)
    with pytest.raises(UserError, match="cannot be pickled"):
        pickle.dumps(CustomRecipe(lambda role: "mxfp8"))


def test_a_request_of_one_s_own_is_asked_by_the_slot():
    class Mine(QuantizerRequest):
        def quantizer(self, role: QuantizerRole):
            return compat.MXFP8Quantizer(compat.DType.kFloat8E4M3).frozen

    assert texts(CustomRecipe(lambda role: Mine())) == ["mxfp8"] * 3 and isinstance(
        DelayedScalingRequest(), QuantizerRequest
    )


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
