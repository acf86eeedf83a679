"""Runs in hqsweep's folders as logs: finished ones count, and a sweep's verdicts are those of compare to the digit."""

import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, judge_files
from hqsweep.report.compare.compare import compare
from tests.report.conftest import fork_study, three_arms, write_sweep


def judged(folder, metric, **question):
    return judge_files([folder], Question(metric=metric, **question), Reading(columns={}))


def test_a_sweep_of_own_runs_has_the_verdicts_of_compare(tmp_path):
    write_sweep(tmp_path / "runs/own", three_arms())
    own = compare(hq.Sweep(tmp_path / "runs/own").folders, window=1, margin=0.25)
    judgement = judged(tmp_path / "runs/own", "val_loss")
    assert judgement.estimates == own.estimates and len(own.estimates) == 2


def test_forks_have_trunks_and_points(tmp_path):
    gaps = {"null": lambda s, p: 1e-5 * s, "a": lambda s, p: 0.02 + 0.001 * s + p / 1e5}
    write_sweep(tmp_path / "runs/own", fork_study(gaps))
    judgement = judged(tmp_path / "runs/own", "val_loss")
    assert judgement.design == "fork" and set(judgement.estimates) == {"null", "a"}


def test_unfinished_runs_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arm, seed in (("bf16", 0), ("bf16", 1), ("a", 0), ("a", 1)):
        with hq.track("own", arm=arm, seed=seed) as run:
            run.log(1, acc=0.5 + seed / 10)
    with pytest.raises(RuntimeError), hq.track("own", arm="a", seed=2) as run:
        run.log(1, acc=0.1)
        raise RuntimeError("boom")
    judgement = judged(tmp_path / "runs/own", "acc")
    assert judgement.left_out == (f"{run.path.name} is failed (RuntimeError: boom).",)
    assert judgement.estimates["a"].n == 2


def test_nothing_has_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hq.track("own", arm="a").log(1, acc=0.1)
    with pytest.raises(UserError, match="no run has finished; a-s0-"):
        judged(tmp_path / "runs/own", "acc")
