"""The machine's parts: each probe answers, and one that breaks is a row."""

import os

import pytest

from hqsweep.doctor import machine
from hqsweep.doctor.machine import PROBES, parts


def test_every_part_answers():
    found = {part.what: part for part in parts()}
    assert list(found) == list(PROBES)
    assert all(part.detail and part.found is not None for part in found.values())
    assert found["kernel digest"].found and "as every exact build" in found["kernel digest"].detail


def test_a_probe_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PROBES, "gpu", lambda: 1 / 0)
    (gpu,) = (part for part in parts() if part.what == "gpu")
    assert (gpu.found, gpu.detail) == (None, "ZeroDivisionError: division by zero")


def test_an_empty_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "extension", lambda: None)
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.Path, "is_file", lambda path: False)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(PROBES, "kernel digest", lambda: (False, "other"))
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    found = {part.what: part for part in parts()}
    missing = ("cpu kernels", "cuda kernels", "nvcc", "gpu", "wandb", "submitit", "slurm", "chromium")
    assert {what: found[what].found for what in missing} == dict.fromkeys(missing, False)
    assert "no driver" in found["gpu"].detail and "sbatch and scontrol" in found["slurm"].detail


def test_the_daemon_of_mps_is_seen_by_its_pipes(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (before,) = (part for part in machine.parts() if part.what == "mps")
    (tmp_path / "control").touch()
    (after,) = (part for part in machine.parts() if part.what == "mps")
    assert (before.found, after.found) == (False, True) and "take turns" in before.detail
