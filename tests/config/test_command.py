"""The keys of the job command: placeholders, words and what is refused."""

import pytest

from hqsweep.config.command import placeholders
from hqsweep.config.job import parse
from hqsweep.errors import UserError


def config(**keys):
    return parse({"job": "command", "sweep": "s", "command": "train --s {seed}", **keys})


def test_words_are_filled_after_they_are_split():
    made = config(command="run '{recipe} x' {lr} {{a}} {flag}", recipe={"name": "a b"}, args={"lr": 0.1, "flag": True})
    assert made.words("arm", "/r") == ["run", "a b x", "0.1", "{a}", "true"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": "x {sed}"}, r"command: no value for {sed} \(did you mean 'seed'\?\)"),
        ({"command": "x {lr}"}, "known are recipe, seed, arm, run_dir; args.lr=VALUE gives it one"),
        ({"command": "x {}"}, "{} is no placeholder"),
        ({"command": "x {a.b}"}, "{a.b} is no placeholder"),
        ({"command": "x {seed:3}"}, "{seed} is no placeholder"),
        ({"command": "x {"}, "has a brace that is no placeholder"),
        ({"command": "x 'y"}, "close the quotes"),
        ({"command": " "}, "command: empty"),
        ({"log": "{x}"}, "log: no value for {x}"),
        ({"args": {"seed": 1}}, "args.seed: {seed} has a value of its own"),
        ({"judge": {"window": 0}}, "judge.window: got 0"),
        ({"train": {"steps": 1}}, "train: no such key"),
    ],
)
def test_what_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        config(**keys)


def test_placeholders():
    assert placeholders("{a} {{b}} {c}{a}", "command") == ["a", "c", "a"] and placeholders(None, "log") == []


def test_judge_does_not_change_the_run():
    from hqsweep.sweep.store.names import run_id

    ids = {run_id(config(judge=judge).model_dump(mode="json")) for judge in ({}, {"metric": "a"}, {"margin": 0.1})}
    assert len(ids) == 1
