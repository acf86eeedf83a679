"""The machine's parts: each probe answers, and one that breaks is a row."""

import os

import pytest

from hqsweep.cli import doctor
from hqsweep.cli.doctor import PROBES, parts


def test_every_part_answers():
    by_name = {part.what: part for part in parts()}
    assert list(by_name) == list(PROBES)
    assert all(part.detail and part.present is not None for part in by_name.values())
    assert by_name["kernel digest"].present and "as every exact build" in by_name["kernel digest"].detail


def test_a_probe_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PROBES, "gpu", lambda: 1 / 0)
    (gpu,) = (part for part in parts() if part.what == "gpu")
    assert (gpu.present, gpu.detail) == (None, "ZeroDivisionError: division by zero")


def test_an_empty_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "extension", lambda: None)
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.Path, "is_file", lambda path: False)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(PROBES, "kernel digest", lambda: (False, "other"))
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    monkeypatch.setattr(doctor, "frontend_version", lambda: None)
    by_name = {part.what: part for part in parts()}
    missing = ("cpu kernels", "cuda kernels", "nvcc", "gpu", "cudnn frontend", "wandb", "submitit", "slurm", "chromium")
    assert {what: by_name[what].present for what in missing} == dict.fromkeys(missing, False)
    assert "no driver" in by_name["gpu"].detail and "sbatch and scontrol" in by_name["slurm"].detail


def test_slurm_without_a_configuration_is_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path):
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'sbatch: fatal: Could not establish a configuration' >&2; exit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (slurm,) = (part for part in parts() if part.what == "slurm")
    assert slurm.present is False and "no node of a Slurm cluster: sbatch: fatal: Could not" in slurm.detail


def test_the_daemon_of_mps_is_seen_by_its_pipes(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (before,) = (part for part in parts() if part.what == "mps")
    (tmp_path / "control").touch()
    (after,) = (part for part in parts() if part.what == "mps")
    assert (before.present, after.present) == (False, True) and "take turns" in before.detail
