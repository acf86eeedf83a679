"""What a training reports of each step."""

from types import SimpleNamespace

import pytest

from hqsweep.jobs import training_report


def reported(monkeypatch, start, steps, at):
    """The part that is done at a step, as the report of a training from `start` to `steps` says."""
    monkeypatch.setattr(training_report, "steps_fields", lambda trainer: None)
    monkeypatch.setattr(training_report, "above_source", lambda trainer: None)
    train = SimpleNamespace(batch=2, context=8, steps=steps)
    config = SimpleNamespace(train=train, start=start, own_steps=steps - start)
    parts = []
    sink = SimpleNamespace(rows=lambda *_: None, progress=lambda *_, part: parts.append(part))
    report = training_report.Report(SimpleNamespace(config=config, step=start), sink, None, [])
    report.step(SimpleNamespace(step=at, loss=None, metrics=None, stats=[], what_if=[], captured=None))
    return parts[0]


@pytest.mark.parametrize(("start", "at", "part"), [(0, 40, 0.4), (60, 80, 0.5), (60, 100, 1.0)])
def test_the_part_that_is_done_is_of_the_own_steps_of_a_fork(start, at, part, monkeypatch):
    assert reported(monkeypatch, start, 100, at) == pytest.approx(part)
