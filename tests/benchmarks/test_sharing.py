"""benchmarks/sharing.py: its sweep runs, and one that fails is an error."""

import subprocess

import pytest

from benchmarks.sharing import steps_a_second, study_samples, sweep_seconds


@pytest.mark.slow
def test_a_sweep_is_timed_from_start_to_end():
    tiny = {"model.dim": "32", "model.layers": "1", "model.heads": "1", "train.batch": "1", "train.eval_batches": "1"}
    tiny |= {"train.steps": "2", "train.eval_every": "2", "data.markov.length": "20000", "train.device": "cpu"}
    assert 0.5 < sweep_seconds(1, 1, **tiny) < 300


@pytest.mark.slow
def test_a_sweep_that_cannot_run_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        sweep_seconds(1, 1, **{"train.device": "tpu"})


def test_steps_count_while_all_train():
    """From second 4, when the later one is warm, to second 8, when the first one is done: 4 and 2 steps a second."""
    samples = {"a": [(1.0, 4), (2.0, 8), (4.0, 16), (8.0, 32)], "b": [(3.0, 4), (4.0, 6), (7.0, 12), (20.0, 32)]}
    assert steps_a_second(samples, steps=32, warm=5) == 6.0
    with pytest.raises(RuntimeError, match="give more --steps"):
        steps_a_second({"a": [(0.0, 8), (1.0, 32)], "b": [(2.0, 8), (3.0, 32)]}, steps=32, warm=5)


@pytest.mark.slow
def test_runs_are_sampled_while_they_train():
    tiny = {"model.dim": "32", "model.layers": "1", "model.heads": "1", "train.batch": "1", "train.context": "16"}
    samples = study_samples(2, "bf16", 5, **tiny, **{"data": "markov", "train.device": "cpu"})
    assert len(samples) == 2 and all(of_run[-1][1] == 5 for of_run in samples.values())
