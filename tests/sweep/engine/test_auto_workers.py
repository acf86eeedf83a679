"""engine.workers=auto: runs at a time are doubled while they gain tokens a second, and the number is remembered."""

from types import SimpleNamespace

import pytest
import torch

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs.pace import Pace
from hqsweep.sweep.engine import auto_workers
from hqsweep.sweep.engine.auto_workers import runs_at_a_time

GIB = 2**30


def config(recipe="mxfp8", engine=None, **train):
    return parse({
        "job": "convergence", "sweep": "s", "recipe": {"name": recipe, "linear": recipe},
        "data": {"source": "markov"}, "train": {"device": "auto", **train}, "engine": engine or {},
    })  # fmt: skip


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with two GPUs of 80 GiB. rates: the tokens a second of runs at a time; asked: what was timed."""
    machine = SimpleNamespace(rates={1: 100.0}, memory=GIB, asked=[], said=[])

    def measured(config, *, together=1, threads=1, imports=()):
        machine.asked.append((config["recipe"]["name"], together))
        if together not in machine.rates:
            raise UserError("no step could be timed: OutOfMemoryError")
        rate = machine.rates[together]
        return Pace(
            together=together, seconds=1, steps=10, start=1, tokens_per_s=rate, memory=machine.memory, device="c"
        )

    monkeypatch.setenv("HQSWEEP_CACHE", str(tmp_path))
    monkeypatch.setattr(auto_workers, "measure", measured)
    monkeypatch.setattr(auto_workers, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(auto_workers, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * GIB))
    return machine


@pytest.mark.parametrize(
    ("rates", "memory", "runs"),
    [
        ({1: 100.0, 2: 104.0}, GIB, 1),
        ({1: 100.0, 2: 150.0, 4: 151.0}, GIB, 2),
        ({1: 100.0, 2: 180.0, 4: 300.0, 8: 500.0}, GIB, 8),
        ({1: 100.0, 2: 180.0}, GIB, 2),
        ({1: 100.0, 2: 180.0}, 50 * GIB, 1),
    ],
)
def test_runs_are_doubled_while_they_gain(rates, memory, runs, gpu) -> None:
    gpu.rates, gpu.memory = rates, memory
    many = [config("bf16"), *[config()] * 40]
    assert runs_at_a_time(many, (), gpu.said.append) == 2 * runs
    assert {name for name, _ in gpu.asked} == {"mxfp8"} and len(gpu.said) >= 2
    timed = len(gpu.asked)
    assert runs_at_a_time(many, (), gpu.said.append) == 2 * runs and len(gpu.asked) == timed
    assert "as measured before" in gpu.said[-1]
    runs_at_a_time([config(context=64)], (), gpu.said.append)
    assert len(gpu.asked) > timed, "another shape is measured"


def test_no_more_workers_than_runs_and_one_on_a_cpu(gpu, monkeypatch) -> None:
    gpu.rates = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0}
    assert runs_at_a_time([config()] * 3, (), gpu.said.append) == 3
    monkeypatch.setattr(auto_workers, "pick_device", lambda name: torch.device("cpu"))
    assert runs_at_a_time([config()] * 3, (), gpu.said.append) is None


@pytest.mark.parametrize("keys", [{"kind": "slurm"}, {"runs_per_gpu": 2}])
def test_auto_is_refused_where_something_else_decides(keys) -> None:
    with pytest.raises(UserError, match=r"engine.workers: auto measures this machine's GPUs, and .* decides here"):
        config(engine={"workers": "auto", **keys})
