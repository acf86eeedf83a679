"""What a recipe does to the modules of a model: whether it quantizes anything, and what two recipes have in common."""

import pytest

from hqsweep.config.job import gemm_modules
from hqsweep.config.model import ModelConfig
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.applied import TABLES, applied, asks, why_nothing
from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.products import linear_module

GPT = (*gemm_modules(ModelConfig(dim=64, layers=2, heads=2), 256, 2, 64), *TABLES)
MIXTURE = (*gemm_modules(ModelConfig(dim=64, layers=2, heads=2, experts=4), 256, 2, 64), *TABLES)
HEAD = (linear_module("head", 64, 256, 0),)
STEPS = 100


def on(modules, linear="mxfp8", **sections):
    return applied(parse_recipe({"linear": linear, **sections}), STEPS, modules)


VAIN = {
    "only the head is there": (HEAD, {}, "recipe.linear meets no module here, and head takes recipe.head, in high"),
    "overrides take all back": (
        GPT, {"overrides": [{"name": "*", "linear": "bf16"}]}, "recipe.overrides take back all 8 modules",
    ),
    "no attention is there": (HEAD, {"linear": "bf16", "dpa": "mxfp8"}, "recipe.dpa meets no module here"),
    "no experts are there": (GPT, {"linear": "bf16", "grouped_linear": "mxfp8"}, "recipe.grouped_linear meets no mod"),
    "tables of somebody else's model": (
        HEAD, {"linear": "bf16", "embedding": "mxfp8", "norm": "mxfp8"}, "recipe.embedding and recipe.norm meet no mod",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("modules", "sections", "why"), VAIN.values(), ids=VAIN)
def test_what_quantizes_nothing_is_bf16_and_says_why(modules, sections, why):
    recipe = parse_recipe({"linear": "mxfp8"} | sections)
    own = applied(recipe, STEPS, modules)
    assert not own.quantizes and own == on(modules, "bf16") and asks(recipe)
    assert why_nothing(recipe, modules).startswith(why)


QUANTIZES = {
    "one layer by an override": (
        GPT,
        {"linear": "bf16", "overrides": [{"name": "layers.1.mlp.fc1", "linear": "mxfp8"}]},
    ),
    "all but one layer": (GPT, {"overrides": [{"name": "layers.0.*", "linear": "bf16"}]}),
    "the head alone": (HEAD, {"head": "mxfp8"}),
    "attention alone": (GPT, {"linear": "bf16", "dpa": "mxfp8"}),
    "experts alone": (MIXTURE, {"linear": "bf16", "grouped_linear": "mxfp8"}),
    "the embedding alone": (GPT, {"linear": "bf16", "embedding": "mxfp8"}),
    "one direction of one tensor": (GPT, {"linear": {"input": "bf16|mxfp8", "weight": "bf16", "grad_output": "bf16"}}),
    "the last step": (GPT, {"linear": "bf16", "schedule": [{"at": STEPS - 1, "linear": "mxfp8"}]}),
}


@pytest.mark.parametrize(("modules", "sections"), QUANTIZES.values(), ids=QUANTIZES)
def test_what_quantizes_a_slot_at_any_step_is_no_bf16(modules, sections):
    own = on(modules, **{"linear": "mxfp8"} | sections)
    assert own.quantizes and own != on(modules, "bf16")


def test_recipes_are_equal_by_what_they_compute():
    assert on(HEAD, head="mxfp8") == on(HEAD, "nvfp4", head="mxfp8")
    assert on(GPT) == on(GPT, overrides=[{"name": "layers.*", "linear": "mxfp8"}]) != on(GPT, "mxfp8+2d")
    assert on(GPT) == on(GPT, gemm="strict") != on(GPT, gemm="native")
    assert on(GPT, "bf16", gemm="native") == on(GPT, "bf16")
    assert on(GPT, "bf16", dpa="fp32") == on(GPT, "bf16") != on(GPT, "fp32")
    assert on(GPT, "nvfp4|mxfp8") != on(GPT, "nvfp4|mxfp8@rowwise_dequantized")
    assert on(GPT, schedule=[{"at": 10, "linear": "mxfp8"}]) == on(GPT)
    assert on(GPT, schedule=[{"at": 10, "linear": "bf16"}]) != on(GPT, schedule=[{"at": 20, "linear": "bf16"}])


class Mine(HybridQuantizer):
    """A class of somebody else."""


def test_factories_are_asked_for_each_slot():
    high, own = CustomRecipe(qfactory=lambda role: "bf16"), HybridQuantizer.parse("bf16")
    assert applied(high, STEPS, GPT) == on(GPT, "bf16") and asks(high) == ["qfactory"]
    assert why_nothing(high, GPT) == "its qfactory gives high precision for all 11 modules"
    mine = Mine(own.rowwise, own.columnwise)
    one = CustomRecipe(qfactory=lambda role: mine if role.name == "layers.0.mlp.fc1" else "bf16")
    assert applied(one, STEPS, GPT).quantizes
