"""Grids of commands: words for recipes, arms, and commands that would repeat each other."""

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.grid.run_words import read

BOTH = "command=python train.py --recipe {recipe} --seed {seed}"


def grid(*words):
    return expand("command", words)


def test_recipes_are_words_and_arms():
    found = grid(BOTH, "recipe=adamw,my/muon.yaml", "seed=0,1", "baseline=adamw")
    assert [(point.arm, point.config["recipe"]) for point in found.points[::2]] == [
        ("adamw", {"name": "adamw", "text": "adamw"}), ("muon", {"name": "muon", "text": "my/muon.yaml"}),
    ]  # fmt: skip
    assert found.points[0].config["command"] == BOTH.removeprefix("command=") and found.study.baseline == "adamw"


def test_args_make_arms():
    found = grid("command=x {lr}", "args.lr=0.1,0.2")
    assert [point.arm for point in found.points] == ["baseline_lr-0.1", "baseline_lr-0.2"]


def test_named_arms():
    found = grid("command=x {recipe} {lr}", "args.lr=1", "arms={a: {recipe: adamw}, b: {recipe: muon}}")
    assert [point.arm for point in found.points] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["command=x {recipe}", "recipe=a,b", "seed=0,1"], "seed varies over the grid, and no {seed} is in it"),
        (["command=x {seed}", "recipe=a,b", "seed=0,1"], "recipe varies over the grid"),
        (["command=x {seed}", "args.lr=1,2"], "lr varies over the grid"),
        (["command=x {recipe}", "recipe=a,b", "seeds.until=decided"], "seed varies over the grid"),
        ([BOTH, "null_arm=true"], "name it by judge.null_arm=NAME"),
        ([BOTH, "margin=1% tokens"], "knows no tokens of a command"),
        ([BOTH, "fork={at: [3]}"], "a command has no trunk"),
        ([BOTH, "judge.metric=a,b"], "judge.metric cannot be swept"),
        (["recipe=a"], r"command: no value yet \(\?\?\?\); give command=VALUE"),
    ],
)
def test_what_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        read(["conf=command", *words])


def test_the_arm_may_stand_for_the_recipe():
    assert len(grid("command=x {arm} {seed}", "recipe=a,b", "seed=0,1").points) == 4


def test_quotes_of_a_command_are_kept():
    (point,) = grid("""command=python -c 'print("{seed}")' --path a\\b""").points
    assert point.config["command"] == """python -c 'print("{seed}")' --path a\\b"""
