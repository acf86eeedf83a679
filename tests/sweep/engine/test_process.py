"""What workers share: GPUs in turn, up to so many runs each."""

from hqsweep.sweep.engine.process import slots


def devices(*arguments) -> list[str | None]:
    return [slot.get("CUDA_VISIBLE_DEVICES") for slot in slots(*arguments)]


def test_gpus_go_round_the_workers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    assert devices(3, None) == ["3", "GPU-5f", "3"]
    assert devices(None, 2) == ["3", "GPU-5f", "3", "GPU-5f"]
    assert devices(3, 2) == ["3", "GPU-5f", "3"]
    assert devices(8, 1) == ["3", "GPU-5f"]
    assert devices(None, None) == [None]


def test_one_gpu_or_none_is_not_dealt_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices(5, None) == [None] * 5
    assert devices(5, 3) == devices(None, 3) == [None] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices(2, 3) == [None] * 2
    assert devices(None, 3) == [None]


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g Device 0'\necho 'GPU 1: B (UUID: y)'\n")
    smi.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices(2, None) == ["0", "1"]


def test_a_run_of_several_ranks_has_neighbours_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert devices(None, None, 2) == ["0,1", "2,3"]
    assert devices(1, None, 2) == ["0,1"]
    assert devices(3, None, 4) == ["0,1,2,3"]
    assert devices(3, None, 8) == [None] * 3
    assert devices(None, None, 1) == ["0", "1", "2", "3", "4"]  # each for several ranks
