"""The pace of a training: steps timed in processes of their own, one or several at a time."""

import pytest

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs.pace import TIMED, evaluations, measure

CONFIG = {
    "job": "convergence", "sweep": "pace", "recipe": {"name": "mxfp8", "linear": "mxfp8"},
    "model": {"dim": 32, "layers": 1, "heads": 2}, "data": {"source": "markov", "markov": {"length": 20_000}},
    "train": {"steps": 2, "batch": 4, "context": 32, "device": "cpu", "eval_every": 1, "eval_batches": 3},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_steps_are_timed_together_and_leave_no_files(together, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse(CONFIG).model_dump(mode="json")
    pace = measure(config, together=together)
    assert (pace.together, pace.steps, pace.device, pace.memory) == (together, TIMED["cpu"], "cpu", 0)
    assert pace.tokens_per_s == pytest.approx(together * 4 * 32 / pace.seconds)
    assert pace.seconds > 0 and pace.start > 0
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_training_that_cannot_be_built_gives_its_reason() -> None:
    config = parse(CONFIG).model_dump(mode="json")
    config["data"]["markov"]["length"] = 20
    with pytest.raises(UserError, match=r"no step could be timed: UserError: data: the .* split has .* too short"):
        measure(config)


def test_evaluations_count_as_a_third_of_a_step() -> None:
    assert evaluations(parse(CONFIG)) == pytest.approx(2 * 3 / 3)
