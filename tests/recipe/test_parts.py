"""Parts of matrices that cut blocks are refused before a run with train.parallel.tp starts."""

import pytest

from hqsweep.config.job import gemm_modules, parse
from hqsweep.config.model import ModelConfig
from hqsweep.errors import UserError
from hqsweep.recipe import Recipe
from hqsweep.recipe.validate import check_parts

WHOLE = {"dim": 128, "layers": 2, "heads": 2, "ffn": 128}


def check(recipe, ranks=2, steps=10, vocabulary=128, **model):
    modules = gemm_modules(ModelConfig(**WHOLE | model), vocabulary, 2, 64)
    check_parts(Recipe.from_config(recipe if isinstance(recipe, dict) else {"linear": recipe}), steps, modules, ranks)


@pytest.mark.parametrize(
    ("recipe", "model", "why"),
    [
        ("mxfp8", {"ffn": 96}, r"48 features each of layers.0.mlp.fc1, which cut blocks of 32 of its weight, mxfp8;"
         r" give a multiple of 64, such as model.ffn=128, or fewer ranks"),
        ("mxfp8", {"dim": 96}, r"48 features each of layers.0.attn.qkv, .* multiple of 64, such as model.dim=128"),
        ("fp8_block", {}, r"64 features each of layers.0.attn.qkv, which cut blocks of 128 of its weight, fp8_block"),
        ({"linear": "mxfp8", "overrides": [{"name": "*.fc1", "linear": "bf16"}]}, {"ffn": 96},
         r"layers.0.mlp.fc2, which cut blocks of 32 of its input, mxfp8"),
        ({"linear": "bf16", "grouped_linear": "mxfp8"}, {"experts": 2, "expert_ffn": 96},
         r"48 .* such as model.expert_ffn=128,"),
        ({"linear": "bf16", "head": "mxfp8"}, {"vocabulary": 96}, r"48 .* of head, .* give a multiple of 64 or"),
        ({"linear": {"input": "bf16", "weight": "mxfp8|bf16", "grad_output": "bf16"}}, {"ffn": 96},
         r"layers.0.mlp.fc2, which cut blocks of 32 of its weight"),
    ],
)  # fmt: skip
def test_what_is_refused(recipe, model, why):
    with pytest.raises(UserError, match="train.parallel.tp: 2 ranks have .*" + why):
        check(recipe, **model)


def test_projected_weights_are_not_shared():
    recipe = {"linear": {"input": "mxfp8", "weight": "project(mxfp4) > mxfp8", "grad_output": "mxfp8"}}
    sentence = r"layers.0.attn.qkv has the weight project\(mxfp4\) > mxfp8, and ranks share no projected weight"
    with pytest.raises(UserError, match=f"train.parallel.tp: {sentence}"):
        check(recipe)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_current", "fp8_delayed", "nvfp4", "nvfp4+row_scaled|mxfp8"])
def test_parts_of_whole_blocks_are_not(recipe):
    check(recipe)
    check({"linear": "bf16"}, ffn=98, dim=100)


def test_a_config_is_checked_by_the_recipe_that_it_has():
    config = {
        "job": "convergence", "sweep": "t", "recipe": {"name": "r", "linear": "mxfp8"}, "model": WHOLE | {"ffn": 96},
        "data": {"source": "markov", "markov": {"length": 20000}}, "train": {"batch": 2, "context": 64},
    }  # fmt: skip
    assert parse(config).train.parallel.tp == 1
    config["train"] |= {"parallel": {"tp": 2}}
    later = {"name": "r", "linear": "bf16", "schedule": [{"at": 5, "linear": "mxfp8"}]}
    for recipe in (config["recipe"], later):
        with pytest.raises(UserError, match=r"train.parallel.tp: 2 ranks have 48 features each of layers.0.mlp.fc1"):
            parse(config | {"recipe": recipe})
    parse(config | {"recipe": later | {"schedule": []}})
