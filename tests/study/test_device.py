"""The device of a plan's runs, how it is known, and minutes that steps measured now give."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.config.job import parse
from hqsweep.study import forecast
from hqsweep.study.device import device_of

WORDS = [
    "run", "conf=convergence", "data=markov", "data.markov.length=20000", "train.steps=40", "train.batch=4",
    "train.context=32", "recipe=bf16,mxfp8", "track=none", "train.eval_every=40", "train.eval_batches=3",
]  # fmt: skip


def config(device="auto", **engine):
    return parse({
        "job": "convergence", "sweep": "s", "recipe": {"name": "mxfp8", "linear": "mxfp8"},
        "data": {"source": "markov"}, "train": {"device": device}, "engine": engine,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("found", "device", "engine", "said"),
    [
        (False, "auto", {}, "the CPU (train.device=auto, and torch finds no GPU here)"),
        (True, "cpu", {}, "the CPU (train.device=cpu)"),
        (True, "auto", {}, "NVIDIA H100 (train.device=auto, and torch finds it here)"),
        (False, "cuda", {}, "a GPU (train.device=cuda, and torch finds none here)"),
        (
            False,
            "auto",
            {"kind": "slurm", "slurm": {"gres": "gpu:2"}},
            "a GPU (train.device=auto, engine.slurm.gres=gpu:2)",
        ),
        (True, "auto", {"kind": "slurm"}, "the CPU (train.device=auto, engine.slurm.gres asks for none)"),
    ],
)
def test_the_device_of_a_run_and_how_it_is_known(found, device, engine, said, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert str(device_of(config(device, **engine))) == said


def test_measured_steps_give_the_minutes(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = []

    def measured(config, *, threads, imports):
        asked.append(config["recipe"]["name"])
        seconds = {"bf16": 3.0, "mxfp8": 6.0}[asked[-1]]
        rate = 128 / seconds
        return forecast.StepPace(
            together=1, seconds=seconds, steps=2, start=30, tokens_per_s=rate, memory=0, device="cpu"
        )

    monkeypatch.setattr(forecast, "measure", measured)
    ran = CliRunner().invoke(app, [*WORDS, "seed=0,1", "--dry-run", "--measure"])
    assert ran.exit_code == 0 and asked == ["bf16", "mxfp8"], ran.output
    # two seeds of 40 steps and 3 forwards of an evaluation, each a third of a step; 30 s of loading for each kind
    minutes = 2 * (3 + 6) * 41 / 60 + 2 * 30 / 60
    assert f"4 to do, about {minutes:.0f} minutes (by 2 steps of each kind of run, measured now on cpu" in ran.stdout
    assert "on the CPU (train.device=auto" in ran.stdout and "measured 2 of 2: mxfp8, 6 s a step" in ran.stderr
    rows = json.loads(CliRunner().invoke(app, [*WORDS, "--dry-run", "--measure", "--json"]).stdout)
    assert [round(row["minutes"], 3) for row in rows] == [round(3 * 41 / 60, 3), round(6 * 41 / 60, 3)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*WORDS, "--measure"], "--measure: times steps for the minutes of --dry-run; add --dry-run"),
        (["run", "conf=parity", "--dry-run", "--measure"], "times trainings on this machine, and this sweep has none"),
    ],
)
def test_where_nothing_can_be_measured_a_sentence_says_so(words, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2 and sentence in ran.stderr, ran.output
