"""recipe.comm: its texts, its faults, and its place in a recipe."""

import pytest

from hqsweep.errors import UserError
from hqsweep.recipe import Recipe, parse_recipe
from hqsweep.recipe.applied import applied
from hqsweep.recipe.argument import recipe_config
from hqsweep.recipe.listing import described, parts
from hqsweep.recipe.sections import COMM_RANKS, Comm


def test_a_text_and_a_mapping():
    assert str(Comm.parse("bf16", "comm")) == f"bf16 between {COMM_RANKS} ranks"
    one = Comm.parse({"format": "nvfp4+sr", "ranks": 4}, "comm")
    assert one.to_config() == {"format": "nvfp4+sr", "ranks": 4} and Comm.parse(one.to_config(), "comm") == one


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("mxfp9", r"recipe.comm.format: .*mxfp9"),
        (8, r"recipe.comm is 8; it takes a format, such as bf16, or \{format, ranks\}"),
        ({"ranks": 4}, r"recipe.comm is \{'ranks': 4\}; it takes a format"),
        ({"format": "bf16", "rank": 4}, r"did you mean 'ranks'"),
        ({"format": "bf16", "ranks": 0}, r"recipe.comm.ranks: got 0; it must be an integer of 1 or more"),
        ("mxfp8+2d", r"recipe.comm.format: mxfp8\+2d has a transform, tiles of several rows, or scales"),
        ("fp8_delayed", r"recipe.comm.format: fp8_delayed has"),
        ("nvfp4+rht", r"recipe.comm.format: nvfp4\+rht has"),
    ],
)
def test_faults_are_sentences(value, said):
    with pytest.raises(UserError, match=said):
        parse_recipe({"linear": "mxfp8", "comm": value})


def test_a_recipe_keeps_it_and_one_without_has_the_text_of_before():
    plain, own = Recipe.from_config({"linear": "mxfp8"}), Recipe.from_config({"linear": "mxfp8", "comm": "bf16"})
    assert "comm" not in recipe_config(plain) and own != plain
    assert parse_recipe(recipe_config(own)) == own
    assert parts(own)["comm"] == described(own)["comm"] == "bf16 between 8 ranks"
    healed = parse_recipe({"linear": "mxfp8", "comm": "bf16", "schedule": [{"at": 3, "comm": "fp32"}]})
    assert [str(healed.comm.format), str(healed.schedule[0].recipe.comm.format)] == ["bf16", "fp32"]


def test_an_arm_with_another_exchange_computes_something_else():
    ones = [parse_recipe({"linear": "mxfp8", **own}) for own in ({}, {"comm": "bf16"}, {"comm": "fp32"})]
    assert len({applied(one, 10, []) for one in ones}) == 3
