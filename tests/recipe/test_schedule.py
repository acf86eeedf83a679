"""Schedules: what a change says, what it keeps, where it falls, and its canonical text."""

import pickle

import pytest

from hqsweep.errors import UserError
from hqsweep.recipe import CustomRecipe, QuantizerRole, find_factory, parse_recipe
from hqsweep.recipe.argument import recipe_config
from hqsweep.recipe.stages import stages

NVFP4 = {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"}


def factory(role):
    return "mxfp8"


def recipe(*schedule, linear=NVFP4, **sections):
    return parse_recipe({"name": "r", "linear": linear, "schedule": list(schedule), **sections}, find_factory)


def slots(recipe, name="layers.0.fc"):
    return [str(recipe.quantizer(QuantizerRole("linear", t, name))) for t in ("input", "weight", "grad_output")]


def test_forward_to_bf16_for_the_last_18_percent():
    scheduled = recipe({"at": 0.82, "fprop": "bf16"})
    first, last = stages(scheduled, 200)
    assert (first.first_step, last.first_step) == (1, 165)  # 164 updates before, 36 after
    assert slots(first.recipe) == list(NVFP4.values())
    assert slots(last.recipe) == ["bf16|nvfp4+rht", "bf16|nvfp4+2d", "nvfp4+rht+sr"]
    assert first.recipe == recipe() and last.recipe.head == recipe().head


def test_a_gemm_changes_both_of_its_operands_everywhere():
    overrides = [{"layers": 0, "linear": "mxfp8"}]
    scheduled = recipe({"at": 10, "dgrad": "bf16"}, {"at": 20, "wgrad": "fp32"}, overrides=overrides, head="mxfp8")
    _, second, third = [stage.recipe for stage in stages(scheduled, 100)]
    assert slots(second, "head") == ["mxfp8", "mxfp8|bf16", "bf16|mxfp8"]
    assert slots(second, "layers.0.fc") == ["mxfp8", "mxfp8|bf16", "bf16|mxfp8"]
    assert slots(third, "layers.1.fc") == ["nvfp4|fp32", "nvfp4+2d|bf16", "bf16|fp32"]
    assert third.grouped_linear == third.linear


def test_a_change_keeps_what_it_does_not_say():
    scheduled = recipe({"at": 5, "linear": {"input": "mxfp8"}}, norm="bf16", grouped_linear="mxfp4")
    changed = stages(scheduled, 10)[1].recipe
    assert slots(changed) == ["mxfp8", "nvfp4+2d", "nvfp4+rht+sr"]
    assert str(changed.norm) == "bf16" and str(changed.grouped_linear.weight) == "mxfp4"
    follows = stages(recipe({"at": 5, "linear": "mxfp8"}), 10)[1].recipe
    assert follows.grouped_linear == follows.linear


def test_factories_and_sections_may_follow_each_other():
    path = f"{__name__}.factory"
    scheduled = recipe({"at": 1, "qfactory": path}, {"at": 2, "linear": "bf16"})
    recipes = [stage.recipe for stage in stages(scheduled, 4)]
    assert isinstance(recipes[1], CustomRecipe) and slots(recipes[1]) == ["mxfp8"] * 3
    assert slots(recipes[2]) == ["bf16"] * 3


def test_the_canonical_text_reads_back_and_equal_schedules_are_equal():
    short = recipe({"at": 0.5, "fprop": "bf16"}, {"at": 0.75, "wgrad": "bf16"})
    text = recipe_config(short)
    assert parse_recipe({"name": "other", **text}) == short and recipe_config(parse_recipe(text)) == text
    assert hash(short) == hash(recipe({"at": 0.5, "fprop": "bf16"}, {"at": 0.75, "wgrad": "bf16"}))
    assert short != recipe({"at": 0.5, "fprop": "bf16"}) and pickle.loads(pickle.dumps(short)) == short


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([{"at": 0.5}], r"recipe.schedule\[0\] is .*; it takes at, and at least one of fprop, dgrad, wgrad, linear"),
        ([{"fprop": "bf16"}], r"recipe.schedule\[0\] is .*; it takes at"),
        ([{"at": 0.5, "frpop": "bf16"}], r"recipe.schedule\[0\] .*did you mean 'fprop'"),
        ([{"at": 1.5, "fprop": "bf16"}], r"recipe.schedule\[0\].at: got 1.5; it takes a number of updates"),
        ([{"at": True, "fprop": "bf16"}], r"recipe.schedule\[0\].at: got True"),
        ([{"at": 0, "fprop": "bf16"}], r"recipe.schedule\[0\].at: got 0"),
        ([{"at": 0.5, "fprop": "bf61"}], r"recipe.schedule\[0\].fprop: format 'bf61': unknown name"),
        ([{"at": 0.5, "wgrad": "nvfp4+row_scaled"}], r"columnwise format nvfp4\+row_scaled"),
        ([{"at": 0.5, "linear": {"inptu": "bf16"}}], r"recipe.schedule\[0\].linear: unknown key 'inptu'"),
        ([{"at": 1, "qfactory": "no.such"}], r"recipe.schedule\[0\].qfactory: 'no.such' cannot be imported"),
        ({"at": 0.5}, "recipe.schedule is .*; it takes a list of changes"),
        ([{"at": 3, "x": 1}, {"at": 0.5, "fprop": "bf61"}], r"schedule\[0\] is .*; recipe.schedule\[1\].fprop"),
    ],
)
def test_wrong_schedules(schedule, message):
    with pytest.raises(UserError, match=message):
        parse_recipe({"linear": "mxfp8", "schedule": schedule}, find_factory)


def test_a_part_of_a_recipe_cannot_change_a_factory():
    path = f"{__name__}.factory"
    with pytest.raises(UserError, match=r"schedule\[0\]: fprop cannot change a Python qfactory"):
        parse_recipe({"qfactory": path, "schedule": [{"at": 0.5, "fprop": "bf16"}]}, find_factory)


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ([300], 200, r"schedule\[0\].at: 300 is after 300 of 200 updates; a change comes after at least one"),
        ([200], 200, "after 200 of 200"),
        ([0.001], 100, "after 0 of 100"),
        ([0.5, 20], 100, r"schedule\[1\].at: 20 is after 20 of 100 updates, but the change before it after 50"),
        ([50, 0.5], 100, "give them in order"),
    ],
)
def test_changes_must_fit_the_run(changes, steps, message):
    scheduled = recipe(*({"at": at, "fprop": "bf16"} for at in changes))
    with pytest.raises(UserError, match=message):
        stages(scheduled, steps)
