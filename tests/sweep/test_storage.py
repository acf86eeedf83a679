"""A disk that is full or read-only: one clear message, nothing lost, and the same call goes on when there is room."""

import multiprocessing
import shutil
import subprocess

import pytest
from support.sweep import fake_worker, kill_sweep

from hqsweep.errors import UserError
from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine import process
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.files import read_json
from hqsweep.sweep.store.store import RunStore


class Quiet(PlainDisplay):
    def __init__(self):
        super().__init__(fake_worker.Console())
        self.last = {}

    def update(self, run, status):
        self.last[run] = status

    def say(self, line):
        pass


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MB; disk(option) mounts it again with an option such as ro."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*words):
        return subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)

    mounted = mount("-t", "tmpfs", "-o", "size=3m", "tmpfs")
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    yield folder, lambda option: mount("-o", f"remount,{option}")
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_a_run_and_nothing_else(disk, tmp_path):
    folder, _ = disk
    run, other = kill_sweep.make_sweep(folder / "runs")[:2]
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(free - 100_000))  # too little for a checkpoint
    (status,) = run_local([run], display=Quiet(), limits=Limits(threads=1))
    assert (status["state"], status["exit_code"]) == ("failed", 3), run.log.read_text()
    assert status["reason"] == "OSError: [Errno 28] No space left on device"
    assert [row["step"] for row in run.rows("metrics")][-1] == 10
    assert list(run.checkpoint.iterdir()) == []

    with (folder / "filler").open("ab", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4096))
    display = Quiet()
    run_local([other], display=display, limits=Limits(threads=1))
    reason = display.last[other.name]["reason"]
    assert "No space left on device" in reason or reason.startswith(f"cannot write in {other.path}; is the disk full")

    (folder / "filler").unlink()
    (status,) = run_local([run], display=Quiet(), limits=Limits(threads=1))
    assert status["state"] == "finished", status
    assert sorted({row["step"] for row in run.rows("metrics")}) == list(range(1, 51))


def test_a_read_only_folder_is_told_in_one_sentence(disk, make_runs, planned, monkeypatch):
    folder, remount = disk
    store = RunStore(folder / "runs")
    (run,) = store.create(sweep="fakes", conf="fakes", overrides=[], runs=[planned()])
    remount("ro")
    with pytest.raises(
        UserError, match=r"^runs_dir: nothing can be written in .*Read-only file system.*; make room or"
    ):
        store.create(sweep="fakes", conf="fakes", overrides=[], runs=[planned(seed=1)])
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    display = Quiet()
    run_local([run], display=display)
    assert display.last[run.name]["reason"].startswith("cannot be started: [Errno 30] Read-only file system")
    remount("rw")
    assert run_local([run], display=display)[0]["state"] == "finished"


def test_parents_that_add_runs_to_a_sweep_at_once_lose_none(store, planned):
    context = multiprocessing.get_context("fork")
    points = [planned(seed=seed) for seed in range(8)]

    def add(point):
        store.create(sweep="fakes", conf="fakes", overrides=[], runs=[point])

    parents = [context.Process(target=add, args=(point,)) for point in points]
    for parent in parents:
        parent.start()
    for parent in parents:
        parent.join()
    assert sorted(run.config()["seed"] for run in store.runs("fakes")) == list(range(8))
    assert len(read_json(store.root / "fakes" / "sweep.json")["runs"]) == 8
