"""Recipes: resolution by role and name, values, and sections that name every key at fault."""

import pickle

import pytest

from hqsweep.errors import UserError
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import QuantizerRole, Recipe
from hqsweep.recipe.roles import module_roles

NVFP4 = {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"}


def recipe(linear="mxfp8", **sections):
    return Recipe.from_config({"name": "r", "linear": linear, **sections})


def test_head_embedding_and_norm_stay_high_precision_unless_told():
    r = recipe()
    assert str(r.quantizer(QuantizerRole("linear", "input", "layers.0.attn.qkv"))) == "mxfp8"
    assert str(r.quantizer(QuantizerRole("linear", "weight", "head"))) == "bf16"
    assert str(r.quantizer(QuantizerRole("embedding", "weight", "embedding"))) == "fp32"
    told = recipe(head="mxfp8", embedding="mxfp4", norm="bf16")
    assert str(told.quantizer(QuantizerRole("linear", "weight", "head"))) == "mxfp8"
    assert str(told.quantizer(QuantizerRole("norm", "weight", "norm"))) == "bf16"


@pytest.mark.feature("F14", "F168")
def test_last_matching_override_wins():
    r = recipe(overrides=[{"name": "layers.1.*", "linear": "bf16"}, {"name": "*.qkv", "linear": "nvfp4"}])
    assert str(r.quantizer(QuantizerRole("linear", "input", "layers.1.attn.qkv"))) == "nvfp4"
    assert str(r.quantizer(QuantizerRole("linear", "input", "layers.1.mlp.fc1"))) == "bf16"
    assert str(r.quantizer(QuantizerRole("linear", "input", "layers.0.mlp.fc1"))) == "mxfp8"


@pytest.mark.feature("F28", "F33", "F34")
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


@pytest.mark.feature("F1")
def test_a_role_is_a_frozen_value_and_prints_what_is_not_empty():
    role = QuantizerRole("linear", "input", "fc1")
    assert role == QuantizerRole(module_type="linear", tensor_type="input", name="fc1") and len({role, role}) == 1
    assert [str(r) for r in (role, QuantizerRole("linear", "input"), QuantizerRole(name="fc1"), QuantizerRole())] == [
        "fc1/linear/input", "linear/input", "fc1", ""
    ]  # fmt: skip
    with pytest.raises(AttributeError):
        role.name = "fc2"


@pytest.mark.feature("F2", "F3")
def test_every_module_type_has_its_tensors_in_slot_order():
    tensors = {t: [role.tensor_type for role in module_roles(t, "m")] for t in ("linear", "grouped_linear", "dpa")}
    assert tensors["linear"] == tensors["grouped_linear"] == ["input", "weight", "grad_output"]
    assert tensors["dpa"] == ["qkv", "s", "do", "dp"]


@pytest.mark.feature("F6")
def test_grouped_linears_follow_linear_unless_told_and_attention_stays_high_precision():
    plain, told = recipe(), recipe(grouped_linear={"input": "nvfp4"}, dpa={"qkv": "mxfp8"})
    roles = [*module_roles("grouped_linear", "layers.0.experts"), *module_roles("dpa", "layers.0.dpa")]
    assert list(map(str, plain.resolve(roles).values())) == ["mxfp8"] * 3 + ["bf16"] * 4
    assert list(map(str, told.resolve(roles).values())) == ["nvfp4", "mxfp8", "mxfp8", "mxfp8", "bf16", "bf16", "bf16"]


def test_layers_are_counted_over_the_whole_model():
    r = recipe(overrides=[{"layers": "last(0.15)", "linear": "bf16"}, {"layers": 0, "name": "*.fc1", "linear": "fp32"}])
    roles = [role for i in range(8) for n in ("fc1", "fc2") for role in module_roles("linear", f"layers.{i}.{n}")]
    texts = {role.name: str(q) for role, q in r.resolve([*roles, *module_roles("linear", "head")]).items()}
    assert {name for name, q in texts.items() if q == "bf16"} == {
        "layers.6.fc1", "layers.6.fc2", "layers.7.fc1", "layers.7.fc2", "head"
    }  # fmt: skip
    assert {name for name, q in texts.items() if q == "fp32"} == {"layers.0.fc1"}


def test_an_override_of_linears_is_one_of_grouped_linears_unless_told():
    roles = [*module_roles("grouped_linear", "layers.0.experts"), *module_roles("linear", "layers.0.fc")]
    follows = recipe(overrides=[{"layers": 0, "linear": "bf16"}]).resolve(roles)
    told = recipe(overrides=[{"layers": 0, "grouped_linear": "bf16"}]).resolve(roles)
    assert list(map(str, follows.values())) == ["bf16"] * 6
    assert list(map(str, told.values())) == ["bf16"] * 3 + ["mxfp8"] * 3


def test_recipes_pickle_and_their_text_reads_back():
    overrides = [{"layers": "last(0.15)", "linear": "bf16"}, {"name": "*.dpa", "layers": [0, -1], "dpa": "mxfp8"}]
    r = recipe(NVFP4, grouped_linear="mxfp8", dpa={"s": "mxfp8"}, overrides=overrides, gemm="strict", norm="bf16")
    assert pickle.loads(pickle.dumps(r)) == r
    assert Recipe.from_config(r.to_config()) == r and Recipe.from_config(r.to_config()).to_config() == r.to_config()


def test_every_fault_of_the_sections_is_told_at_once():
    config = {
        "linear": {"input": "mxfp9", "weight": "mxfp8", "grad_output": "nvfp4+row_scaled"},
        "head": {"wieght": "bf16"},
        "dpa": "x",
        "overrides": [{"layers": "last", "linear": "y"}],
        "gemm": "fast",
    }
    with pytest.raises(UserError) as raised:
        Recipe.from_config(config)
    for part in (
        "recipe.linear.input: format 'mxfp9'", "recipe.linear.grad_output: columnwise format nvfp4+row_scaled",
        "recipe.head: unknown key 'wieght' (did you mean 'weight'?)", "recipe.dpa: format 'x'",
        "recipe.overrides[0].linear: format 'y'", "recipe.overrides[0].layers: got 'last'",
        "recipe.gemm is 'fast'",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_unknown_role_is_our_own_error():
    with pytest.raises(ValueError, match="no slot"):
        recipe().quantizer(QuantizerRole("linear", "qkv", "x"))
    assert str(QuantizerRole("linear", "input", "layers.0.attn.qkv")) == "layers.0.attn.qkv/linear/input"
    assert HybridQuantizer.parse("mxfp8") == recipe().linear.input
