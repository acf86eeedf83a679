"""Runs of commands are judged by what their config and their sweep say."""

import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.foreign_logs.logs import is_of_commands, judge_runs, log_of
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import three_arms, write_sweep

VALUES = {"adamw": [0.7, 0.72, 0.71], "muon": [0.75, 0.772, 0.761]}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arm, values in VALUES.items():
        for seed, value in enumerate(values):
            with hq.track("own", arm=arm, seed=seed, judge={"metric": "acc", "margin": 0.001}) as run:
                for step, part in ((1, 0.5), (2, 1.0)):
                    run.log(step, acc=value * part, loss=1.0)
    return RunStore(tmp_path / "runs").resolve(["own"])


def test_what_the_config_says_and_what_is_asked(runs):
    stated = judge_runs(runs, baseline="adamw")
    expected = hq.judge(VALUES, baseline="adamw", metric="acc", margin=0.001)
    assert stated.estimates == expected._judgement.estimates and not stated.lower
    assert (stated.metric, stated.margin, stated.unit) == ("acc", 0.001, "plain")
    asked = judge_runs(runs, baseline="muon", margin="1%", metric="loss")
    assert (asked.metric, asked.baseline, asked.margin, asked.unit) == ("loss", "muon", 1.0, "%")
    assert judge_runs(runs, baseline="adamw", window=2).arms["mean"].iloc[0] == pytest.approx(0.75 * 0.71)


def test_a_baseline_is_asked_for(runs):
    with pytest.raises(UserError, match=r"which arm is it\? Name one with --baseline"):
        judge_runs(runs)
    with pytest.raises(UserError, match=r"no column of the metric 'acd' \(did you mean 'acc'\?\)"):
        judge_runs(runs, baseline="adamw", metric="acd")


def test_a_growing_study_has_its_maximum(runs):
    import json

    from hqsweep.sweep.store import sweep_file

    folder = runs[0].sweep_path
    facts = {key: value for key, value in sweep_file.read(folder).items() if key != "checksum"}
    study = {"seeds": {"until": "decided", "max": 5}, "baseline": "adamw"}
    sweep_file.write(folder, json.loads(json.dumps(facts | {"study": study})))
    assert log_of(runs).question.maximum == 5 and judge_runs(runs).arms["maximum"].tolist() == [5, 5]
    assert judge_runs(runs).estimates["muon"].ci_low < judge_runs(runs).estimates["muon"].gap


def test_commands_beside_own_runs_are_refused(runs, tmp_path):
    write_sweep(tmp_path / "runs/mine", three_arms())
    mine = RunStore(tmp_path / "runs").resolve(["mine"])
    assert is_of_commands(runs) and not is_of_commands(mine)
    with pytest.raises(UserError, match="of a command and of convergence"):
        is_of_commands([*runs, *mine])
