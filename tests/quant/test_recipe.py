"""Recipes: resolution by role and name, and validation that names every slot at fault."""

import pytest

from hqsweep.errors import UserError
from hqsweep.quant import HybridQuantizer, QuantizerRole, Recipe

LINEARS = [
    ("layers.0.attn.qkv", 128, 384),
    ("layers.0.mlp.fc1", 128, 704),
    ("layers.1.attn.qkv", 128, 384),
    ("head", 128, 256),
]
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


def test_valid_recipes_pass():
    for linear in ("mxfp8", "bf16", NVFP4, "nvfp4|mxfp8@rowwise_dequantized"):
        recipe(linear).validate(LINEARS, 2048)
    recipe(gemm="strict").validate(LINEARS, 2048)


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({**NVFP4, "input": "nvfp4"},
         r"layers.0.attn.qkv wgrad: grad_output columnwise nvfp4\+rht\+sr cannot meet input columnwise nvfp4:"
         r".*both operands or on neither.*\(and in 2 more\)"),
        ({**NVFP4, "weight": "nvfp4+rht"},
         "dgrad: grad_output rowwise nvfp4.sr cannot meet weight columnwise nvfp4.rht"),
    ],
)  # fmt: skip
def test_rht_on_one_operand_is_refused_in_any_mode(linear, message):
    with pytest.raises(UserError, match=message):
        recipe(linear).validate(LINEARS, 2048)


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({"input": "nvfp4|mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"},
         "fprop: input rowwise nvfp4 cannot meet weight rowwise mxfp8 under gemm=strict: their scaling modes differ"),
        ("fp8_block+2d", "128x128 tiles on both sides"),
        ({"input": "bf16", "weight": "fp16", "grad_output": "bf16"}, "takes one dtype"),
    ],
)  # fmt: skip
def test_strict_refuses_pairs_without_hardware_and_exact_takes_them(linear, message):
    recipe(linear).validate(LINEARS, 2048)
    with pytest.raises(UserError, match=message):
        recipe(linear, gemm="strict").validate(LINEARS, 2048)


def test_strict_takes_what_tensor_cores_take():
    mixed = {"input": "mxfp8", "weight": "mxfp4", "grad_output": "mxfp8+e5m2"}
    recipe(mixed, gemm="strict").validate(LINEARS, 2048)
    recipe({"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"}, gemm="strict").validate(
        LINEARS, 64
    )


def test_axes_that_do_not_fit_the_block_are_named():
    with pytest.raises(
        UserError,
        match="head wgrad: the contracted axis has 100 elements, but grad_output columnwise nvfp4 takes",
    ):
        recipe("mxfp8", head="nvfp4").validate(LINEARS, 100)


def test_overrides_must_match_something():
    r = recipe(overrides=[{"name": "layer.0.attn.qkv", "linear": "bf16"}])
    with pytest.raises(UserError, match=r"'layer.0.attn.qkv' matches no linear .did you mean 'layers.0.attn.qkv'"):
        r.validate(LINEARS, 64)


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
