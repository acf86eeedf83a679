"""Checkpoints as they are written: what is on the disk when, which are kept, and what is passed over."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hqsweep.errors import Damaged
from hqsweep.parallel.mesh import Ranks
from hqsweep.train import checkpoint
from hqsweep.train.checkpoint import Saver, load_checkpoint, newest, read_state, save_checkpoint
from hqsweep.train.record import NotAsWritten, check_recorded, checkpoints, mark_of, read_record

CPU = torch.device("cpu")
GPU = torch.device("cuda")
ALONE = Ranks.alone(CPU)


@dataclass
class Counter:
    """What can be resumed, of one number."""

    step: int = 0
    kept: tuple[int, ...] = ()
    device: torch.device = CPU
    ranks: Ranks = ALONE
    loaded: dict = field(default_factory=dict)

    def state(self) -> dict:
        return {"step": self.step, "weight": torch.full((100,), float(self.step))}

    def load_state(self, state: dict) -> None:
        self.loaded = state


def save(folder: Path, *steps: int, **options) -> None:
    for step in steps:
        save_checkpoint(Counter(step, options.pop("kept", ())), folder, **options)


def test_the_record_says_what_was_written_and_what_stood_before_it(tmp_path):
    marks = {"metrics": mark_of(b'{"step": 3}\n')}
    save(tmp_path, 3, rows=marks, run="ab12")
    data = (tmp_path / "step_3.pt").read_bytes()
    record = check_recorded(tmp_path / "step_3.pt")
    assert (record.file, record.bytes, record.sha256) == ("step_3.pt", len(data), hashlib.sha256(data).hexdigest())
    assert (record.rows, record.run, record.point) == (marks, "ab12", False)
    assert marks["metrics"]["rows"] == 1 and marks["metrics"]["bytes"] == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3.json", "step_3.pt"]


def test_the_last_two_and_the_points_are_kept(tmp_path):
    for step in (2, 4, 6, 8, 10):
        save_checkpoint(Counter(step, kept=(4,)), tmp_path)
    assert list(checkpoints(tmp_path)) == [4, 8, 10]
    assert len(list(tmp_path.iterdir())) == 6
    assert [read_record(path).point for path in checkpoints(tmp_path).values()] == [True, False, False]


def test_what_reads_back_otherwise_is_no_checkpoint_and_costs_none(tmp_path, monkeypatch):
    save(tmp_path, 2, 4)
    real = checkpoint.write_record

    def spoil(path, record):
        real(path, record)
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(checkpoint, "write_record", spoil)
    with pytest.raises(Damaged, match=r"step_6\.pt: read back, its bytes are not those that were written; is the disk"):
        save(tmp_path, 6)
    assert list(checkpoints(tmp_path)) == [2, 4] and not (tmp_path / "step_6.json").exists()


def test_without_room_for_the_record_there_is_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)
    real = os.replace

    def full(source, target):
        if str(target).endswith(".json"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2.json", "step_2.pt"]


def test_everything_is_on_the_disk_before_the_next_file_tells_of_it(tmp_path, monkeypatch):
    """The state before its name, its name before its record, the record before its name."""
    seen, sync, replace = [], os.fsync, Path.replace

    def synced(descriptor):
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda path, target: seen.append(f"> {target.name}") or replace(path, target))
    save(tmp_path, 3)
    folder = tmp_path.name
    assert seen == ["step_3.tmp", "> step_3.pt", folder, "step_3.json.tmp", "> step_3.json", folder]


def test_one_that_is_damaged_is_passed_over(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "step_4.pt").write_bytes(b"")
    counter = Counter()
    assert load_checkpoint(counter, tmp_path) and counter.loaded["step"] == 2
    path, faults = newest(tmp_path, lambda path, record: None)
    assert path == tmp_path / "step_2.pt"
    assert [fault.split(": ")[1][:11] for fault in faults.values()] == ["it is empty"]
    assert newest(tmp_path, lambda path, record: "no")[0] is None
    assert not load_checkpoint(counter, tmp_path, before=2)


def test_a_file_by_its_hash(tmp_path):
    path = tmp_path / "step_1.pt"
    path.write_bytes(b"no checkpoint")
    digest = hashlib.sha256(b"no checkpoint").hexdigest()
    with pytest.raises(NotAsWritten, match=r"step_1\.pt: it is no checkpoint \("):
        read_state(path, CPU, digest)
    with pytest.raises(NotAsWritten, match=r"step_1\.pt: it is another file than it was"):
        read_state(path, CPU, "0" * 64)
    with pytest.raises(NotAsWritten, match=r"step_1\.pt: its record step_1\.json is not there"):
        read_state(path, CPU)


@dataclass
class OnGpu(Counter):
    """One whose checkpoints a thread writes. Its weight changes in place, as a training's does."""

    device: torch.device = GPU
    weight: torch.Tensor = field(default_factory=lambda: torch.zeros(2_000_000))
    model: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(2, 2))

    def state(self) -> dict:
        return {"step": self.step, "weight": self.weight}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.weight.fill_(float(self.step))


def test_the_training_goes_on_and_the_file_has_the_state_of_its_step(tmp_path):
    trainer = OnGpu(kept=(2,))
    with Saver(trainer, tmp_path, run="ab12", data="cd") as saver:
        for _ in range(4):
            trainer.train(steps=2)
            saver.save({"metrics": mark_of(b"{}\n")})
            trainer.weight.fill_(-1.0)
    assert list(checkpoints(tmp_path)) == [2, 6, 8]
    for step, path in checkpoints(tmp_path).items():
        record = check_recorded(path)
        assert (record.run, record.data, record.point, record.rows["metrics"]["rows"]) == ("ab12", "cd", step == 2, 1)
        state = read_state(path, CPU)
        assert state["step"] == step and bool((state["weight"] == step).all())
    alone = OnGpu(step=8, weight=torch.full((2_000_000,), 8.0))
    save_checkpoint(alone, tmp_path / "alone")
    assert (tmp_path / "alone" / "step_8.pt").read_bytes() == (tmp_path / "step_8.pt").read_bytes()


def test_a_write_that_fails_is_raised_by_the_next_save_and_by_the_end(tmp_path):
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    trainer = OnGpu()
    with pytest.raises(OSError), Saver(trainer, no_folder, run="", data="") as saver:
        saver.save({})
        saver.save({})
        pytest.fail("the second save knows of the first one's fault")
    with pytest.raises(OSError), Saver(trainer, no_folder, run="", data="") as saver:
        saver.save({})
    with pytest.raises(KeyError), Saver(trainer, no_folder, run="", data="") as saver:
        saver.save({})
        raise KeyError("the training's own error")
