"""What is said of uploads before a sweep starts, and what a quickstart keeps here."""

import pytest

from hqsweep.sweep.grid.run_words import read
from hqsweep.track.tracker import upload_line

pytestmark = pytest.mark.slow

TRACK = {"kind": "wandb", "mode": "auto", "project": "p", "entity": None}
KEY = {"WANDB_API_KEY": "k"}


@pytest.mark.parametrize(
    ("track", "environment", "says"),
    [
        ({}, KEY, "W&B: uploading to p at api.wandb.ai"),
        ({"entity": "lab"}, KEY | {"WANDB_BASE_URL": "https://w.example.org"}, "uploading to lab/p at w.example.org"),
        ({"mode": "offline"}, KEY, "W&B offline: nothing is uploaded"),
        ({"mode": "online"}, {"NETRC": "/dev/null"}, "W&B offline: nothing is uploaded"),
        ({}, KEY | {"WANDB_MODE": "disabled"}, "W&B disabled: nothing is uploaded"),
        ({"kind": "tensorboard"}, KEY, None),
        ({"kind": "none"}, KEY, None),
    ],
)
def test_the_line_says_what_the_run_will_do(track, environment, says):
    line = upload_line(TRACK | track, environment)
    assert line is None if says is None else says in line


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["conf=quickstart"], "offline"),
        (["conf=quickstart", "sweep=mine"], "offline"),
        (["conf=markov", "sweep=quickstart"], "offline"),
        (["conf=quickstart", "track=wandb"], "auto"),
        (["conf=quickstart", "track.mode=online"], "online"),
        (["conf=markov", "sweep=mine"], "auto"),
    ],
)
def test_a_quickstart_uploads_nothing_unless_asked(words, mode):
    assert {point.config["track"]["mode"] for point in read(words).grid.points} == {mode}
