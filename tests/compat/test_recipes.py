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


def test_the_alignment_is_the_recipe_s():
    recipes = compat.NVFP4BlockScaling(), compat.CustomRecipe(compat.mxfp8_factory, quantization_alignment=32)
    assert [get_align_size_for_quantization(recipe) for recipe in recipes] == [128, 32]
