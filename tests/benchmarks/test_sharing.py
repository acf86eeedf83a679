"""benchmarks/sharing.py: its sweep runs, and one that fails is an error."""

import subprocess

import pytest

from benchmarks.sharing import sweep_seconds


@pytest.mark.slow
def test_a_sweep_is_timed_from_start_to_end():
    tiny = {"model.dim": "32", "model.layers": "1", "model.heads": "1", "train.batch": "1", "train.eval_batches": "1"}
    tiny |= {"train.steps": "2", "train.eval_every": "2", "data.markov.length": "20000", "train.device": "cpu"}
    assert 0.5 < sweep_seconds(1, 1, **tiny) < 300


@pytest.mark.slow
def test_a_sweep_that_cannot_run_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        sweep_seconds(1, 1, **{"train.device": "tpu"})
