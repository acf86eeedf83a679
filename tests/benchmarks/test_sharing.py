"""benchmarks/sharing.py: its sweep runs, and one that fails is an error."""

import subprocess

import pytest

from benchmarks import sharing
from benchmarks.sharing import steps_a_second, sweep_seconds


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
    samples = {"a": [(1.0, 4), (2.0, 12), (4.0, 16), (8.0, 32)], "b": [(3.0, 4), (4.0, 6), (7.0, 12), (20.0, 32)]}
    assert steps_a_second(samples, steps=32, warm=5) == 6.0
    with pytest.raises(RuntimeError, match="give more --steps"):
        steps_a_second({"a": [(0.0, 8), (1.0, 32)], "b": [(2.0, 8), (3.0, 32)]}, steps=32, warm=5)


def test_runs_are_sampled_by_what_their_statuses_say(monkeypatch):
    """A status that is read twice, or has no progress yet, is no sample."""

    def follow(conf, words, folder, seen, poll_s):
        assert {"seed=range(2)", "engine.workers=2", "train.steps=5", "recipe=bf16", "model.dim=32"} < set(words)
        for at, step in ((1.0, None), (2.0, 1), (2.0, 1), (3.0, 5), (4.0, 5)):
            for name in ("a", "b"):
                seen(name, {"progress": step and {"step": step}}, at)

    monkeypatch.setattr(sharing, "follow", follow)
    samples = sharing.study_samples(2, "bf16", 5, **{"model.dim": "32"})
    assert samples == {name: [(2.0, 1), (3.0, 5)] for name in ("a", "b")}
