"""The machine over time: rows of a run's processes and GPUs, their summary, and no fault that reaches the run."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hqsweep.config.jobs import SYSTEM
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track import machine
from hqsweep.track.machine import sampled, summary_of
from tests.report.conftest import FakeRun, write_sweep


class Nvml:
    """Two GPUs; each call of energy is a second later at 300 W and 100 W."""

    class NVMLError(Exception):
        pass

    def __init__(self, energy: bool = True) -> None:
        self.energy, self.asked, self.seconds = energy, [], 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        self.asked.append(uuid)
        return 1

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.energy:
            raise self.NVMLError
        self.seconds += handle == 0
        return 7_000_000 + self.seconds * (300_000, 100_000)[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=(90, 50)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return (300_000, 100_000)[handle]


def active(folder: Path, every_s: float, device: str = "cpu") -> RunDir:
    (path,) = write_sweep(folder / "study", [FakeRun(state="running", steps=20)])
    run = RunDir(Path(getattr(path, "path", path)))
    run.write_status(state="running", progress={"step": 0, "steps": 9})
    text = run.config_path.read_text().replace("train:\n", f"train:\n  device: {device}\n")
    run.config_path.write_text(text + f"track: {{system_s: {every_s}}}\n")
    return run


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_run_on_cpus_has_rows_and_a_summary(tmp_path: Path) -> None:
    run = active(tmp_path, 0.05)
    with sampled(run):
        busy = time.process_time()
        until(lambda: time.process_time() - busy > 0.3 and run.jsonl("system").is_file())
        run.write_status(progress={"step": 5, "steps": 9})
    rows = run.rows("system")
    assert len(rows) > 2 and all(set(row) == set(SYSTEM) for row in rows) and rows[-1]["step"] == 5
    assert max(row["cpu_pct"] for row in rows) > 5 and rows[-1]["memory_bytes"] > 10**7
    assert rows[-1]["gpu_pct"] is None and abs(rows[-1]["seconds"] - time.time()) < 60
    assert set(run.manifest()["system"]) == {"cpu_pct_mean", "memory_bytes_max"}


def test_a_short_run_on_cpus_leaves_nothing(tmp_path: Path) -> None:
    run = active(tmp_path, 30.0)
    with sampled(run):
        pass
    assert not run.jsonl("system").exists() and "system" not in run.manifest()


@pytest.mark.parametrize("config", ["", "track: {system_s: 0}\n", "track: null\n"])
def test_a_run_that_asks_for_none_has_none(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write_sweep(tmp_path / "study", [FakeRun(state="running")])
    run = RunDir(Path(getattr(path, "path", path)))
    run.config_path.write_text(run.config_path.read_text() + config)
    monkeypatch.setattr(machine, "_Sampler", None)  # is not called
    with sampled(run):
        pass


@pytest.mark.parametrize(("visible", "asked"), [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-x", [b"GPU-x"])])
def test_gpus_of_the_run_are_measured(visible: str | None, asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = machine._Gpus.visible(2)
    assert nvml.asked == asked
    if len(asked) == 2:
        assert gpus.row() == {"gpu_pct": 70, "gpu_memory_bytes": 3e9, "gpu_watts": 400, "gpu_joules": 0}
        assert gpus.row()["gpu_joules"] == pytest.approx(400)


@pytest.mark.parametrize(("visible", "ranks"), [("", 1), ("-1", 0)])
def test_a_run_without_gpus_measures_none(visible: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._Gpus.visible(ranks) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._Gpus.visible(1) is None


def test_a_gpu_that_cannot_say_its_energy_says_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(energy=False))
    row = machine._Gpus.visible(1).row()
    assert row["gpu_joules"] is None and row["gpu_watts"] == 300


def test_energy_per_token_is_energy_over_tokens() -> None:
    blank = dict.fromkeys(SYSTEM)
    rows = [blank | {"seconds": float(s), "step": 10 * s, "gpu_joules": 300.0 * s, "gpu_pct": 50.0} for s in range(4)]
    assert summary_of(rows, 64) == {"gpu_pct_mean": 50.0, "gpu_joules": 900.0, "joules_per_token": 900 / (30 * 64)}
    assert "joules_per_token" not in summary_of([row | {"step": 3} for row in rows], 64) and not summary_of(
        rows[:1], 64
    )


def test_without_psutil_processes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert machine._Processes.of_this() is None


def test_a_fault_of_the_measurement_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = active(tmp_path, 0.02)
    monkeypatch.setattr(machine._Sampler, "_row", lambda self: os.stat("/no/such/file"))
    with sampled(run):
        pass
    assert capsys.readouterr().out.startswith("warning: the machine is not measured any more (FileNotFoundError")
    assert not run.jsonl("system").exists()
