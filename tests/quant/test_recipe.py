"""Recipes: resolution by role and name, values, and sections that name every key at fault."""

import pytest

from hqsweep.errors import UserError
from hqsweep.quant import HybridQuantizer, QuantizerRole, Recipe

NVFP4 = {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"}


def recipe(linear="mxfp8", **sections):
    return Recipe.from_config({"name": "r", "linear": linear, **sections})


def test_head_embedding_and_norm_stay_high_precision_unless_told():
    r = recipe()
    assert str(r.quantizer(QuantizerRole("linear", "input", "layers.0.attn.qkv"))) == "mxfp8"
    assert str(r.quantizer(QuantizerRole("linear", "weight", "head"))) == "bf16"
    assert str(r.quantizer(QuantizerRole("embedding", "weight", "embedding"))) == "fp32"
    told = recipe(head="mxfp8", embedding="mxfp4", norm="bf16")
    assert str(told.linear_quantizers("head").weight) == "mxfp8"
    assert str(told.quantizer(QuantizerRole("norm", "weight", "norm"))) == "bf16"


def test_last_matching_override_wins():
    r = recipe(overrides=[{"name": "layers.1.*", "linear": "bf16"}, {"name": "*.qkv", "linear": "nvfp4"}])
    assert str(r.linear_quantizers("layers.1.attn.qkv").input) == "nvfp4"
    assert str(r.linear_quantizers("layers.1.mlp.fc1").input) == "bf16"
    assert str(r.linear_quantizers("layers.0.mlp.fc1").input) == "mxfp8"


def test_recipes_are_values():
    assert recipe(NVFP4) == recipe(dict(NVFP4)) and hash(recipe(NVFP4)) == hash(recipe(NVFP4))
    assert recipe() != recipe("nvfp4")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"linear": {"input": "mxfp8", "weight": "mxfp8"}}, "recipe.linear: 'grad_output' is missing"),
        ({"linear": {"imput": "mxfp8"}}, "recipe.linear: unknown key 'imput' .did you mean 'input'"),
        (
            {"linear": {"input": "mxfp9", "weight": "mxfp8", "grad_output": "mxfp8"}},
            "recipe.linear.input: format 'mxfp9'",
        ),
        ({"linear": "mxfp8", "gemm": "exakt"}, "recipe.gemm is 'exakt' .did you mean 'exact'"),
        ({"linear": "mxfp8", "heads": "bf16"}, "unknown key 'heads' .did you mean 'head'"),
        ({}, "'linear' is missing"),
        ({"linear": "mxfp8", "overrides": [{"nam": "x"}]}, r"recipe.overrides\[0\]"),
    ],
)
def test_wrong_sections_name_their_key(config, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_config(config)


def test_unknown_role_is_our_own_error():
    with pytest.raises(ValueError, match="no slot"):
        recipe().quantizer(QuantizerRole("linear", "qkv", "x"))
    assert str(QuantizerRole("linear", "input", "layers.0.attn.qkv")) == "layers.0.attn.qkv/linear/input"
    assert HybridQuantizer.parse("mxfp8") == recipe().linear.input
