"""What a training reports of each step."""

from types import SimpleNamespace

import pytest

from hqsweep.jobs import training_report


def reported(monkeypatch, start, steps, at):
    """(step, steps, the step at which the run begins), as the report of a training from `start` to `steps` says."""
    monkeypatch.setattr(training_report, "steps_fields", lambda trainer: None)
    monkeypatch.setattr(training_report, "above_source", lambda trainer: None)
    train = SimpleNamespace(batch=2, context=8, steps=steps)
    config = SimpleNamespace(train=train, start=start, own_steps=steps - start)
    said = []
    sink = SimpleNamespace(rows=lambda *_: None, progress=lambda *args, first: said.append((*args[:2], first)))
    report = training_report.Report(SimpleNamespace(config=config, step=start), sink, None, [])
    report.step(SimpleNamespace(step=at, loss=None, metrics=None, stats=[], what_if=[], captured=None))
    return said[0]


@pytest.mark.parametrize(("start", "at"), [(0, 40), (60, 80)])
def test_a_fork_says_where_it_begins(start, at, monkeypatch):
    assert reported(monkeypatch, start, 100, at) == (at, 100, start)
