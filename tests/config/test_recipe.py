"""The section `recipe`: its text is parsed once, when the config is made, and the recipe is kept with it."""

import pytest

from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sectioned import Recipe
from hqsweep.sweep.engine.launch import plan

WORDS = ["conf=convergence", "track=none", "recipe=mxfp8", "model.layers=1", "model.dim=32", "model.heads=2"]
WORDS += ["train.steps=1", "train.batch=2", "train.context=32", "train.eval_batches=1"]
WORDS += ["data=markov", "data.markov.length=2000"]


@pytest.fixture
def parsed(monkeypatch):
    """The `linear` sections of the recipes that were made of text since the test began."""
    sections, from_config = [], Recipe.from_config.__func__

    def counted(cls, config, where="recipe"):
        sections.append(config["linear"])
        return from_config(cls, config, where)

    monkeypatch.setattr(Recipe, "from_config", classmethod(counted))
    return sections


@pytest.mark.parametrize("held", ["false", "true"])
def test_the_text_of_a_recipe_is_parsed_once_for_a_point_of_a_grid(parsed, held):
    assert len(plan([*WORDS, f"model.quantized_weights={held}"]).points) == 1 and len(parsed) == 1


def test_the_text_of_a_recipe_is_parsed_once_in_a_run(parsed, tmp_path):
    (point,) = plan(WORDS).points
    parsed.clear()
    convergence.run(parse(point.config), ListSink(), tmp_path)
    assert len(parsed) == 1


def test_a_kept_recipe_is_the_one_that_its_dump_gives():
    text = {"name": "r", "linear": "nvfp4|mxfp8", "schedule": [{"at": 0.5, "fprop": "bf16"}]}
    section = parse({"job": "convergence", "sweep": "s", "recipe": text}).recipe
    assert section.build() == parse_recipe(section.model_dump()) == parse_recipe(text)
    assert section.model_copy().build() is section.build()
