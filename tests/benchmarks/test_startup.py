"""benchmarks/startup.py: parts of a start add up, and a run's are all seen."""

import subprocess

import pytest

from benchmarks.startup import SHORT, note, parts, seconds_to_first_step

TINY = SHORT | {"recipe": "bf16", "train.device": "cpu", "data": "markov", "data.markov.length": "20000"}
TINY |= {"model.dim": "64", "model.layers": "2", "model.heads": "1", "train.batch": "16", "train.context": "128"}
"""Whose first step is seen, however seldom its status is looked at."""


def test_parts_are_the_times_between_what_a_status_says():
    reached = {}
    said = [(None, 1.0), ("loading data", 2.0), ("loading data", 3.0), ("first step", 5.0), ("evaluating", 6.0)]
    for phase, now in [*said, (None, 7.0), (None, 9.0)]:
        note({"phase": phase}, reached, now)
    row = parts(reached)
    assert row == {"command_s": 2.0, "data_s": 0.0, "model_s": 3.0, "first_step_s": 2.0, "seconds": 7.0}


@pytest.mark.slow
def test_a_run_is_followed_from_the_command_to_its_end(tmp_path):
    row = seconds_to_first_step(tmp_path, [f"{key}={value}" for key, value in TINY.items()])
    assert 0 < row["command_s"] < row["seconds"] < row["whole_s"] and row["first_step_s"] > 0


@pytest.mark.slow
def test_a_run_that_fails_is_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        seconds_to_first_step(tmp_path, ["train.device=tpu"])
