"""Folders of runs without their parts, or with something else in their places: named, and mended by the same call."""

import os
import shutil

import pytest
from support.sweep import fake_worker
from support.sweep.shown import Shown

from hqsweep.errors import Damaged
from hqsweep.sweep.engine import process
from hqsweep.sweep.engine.local import run_local
from hqsweep.sweep.store.run_dir import repair

GARBAGE = [b"", b"[]", b"7", b'"text"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"state": []}', b'{"arm": 3, "id": {}}']
DOCUMENTS = ["status.json", "manifest.json", "config.yaml", "job.json"]


@pytest.fixture
def cut(make_runs):
    """A run that was interrupted after a checkpoint."""
    (run,) = make_runs("quick")
    run.checkpoint.mkdir()
    (run.checkpoint / "step_10.pt").write_text("state")
    run.jsonl("metrics").write_text('{"step": 1, "metric": "train_loss", "value": 2.0}\n')
    run.log.write_text("once\n")
    run.job_path.write_text('{"id": "5_0"}\n')
    run.write_status(state="interrupted", reason="stopped by SIGTERM", attempt=1)
    return run


def mended(make_runs, run) -> list[str]:
    """What is said when the same command makes the sweep's folders again; they are fit to be used then."""
    said = []
    (again,) = make_runs("quick", say=said.append)
    assert again == run and all(line.startswith(f"{run.name}: ") for line in said)
    assert run.status()["state"] in ("pending", "interrupted")
    assert run.config()["job"] == run.manifest()["job"] == "convergence"
    assert run.job() in (None, "5_0")
    return [line.removeprefix(f"{run.name}: ") for line in said]


def test_nothing_is_said_of_a_run_that_is_as_it_was_left(make_runs, cut):
    before = {path: path.read_bytes() for path in cut.path.rglob("*") if path.is_file()}
    assert mended(make_runs, cut) == []
    assert {path: path.read_bytes() for path in cut.path.rglob("*") if path.is_file()} == before


def test_a_run_that_was_never_started_has_nothing_to_mend(make_runs):
    (run,) = make_runs("quick")
    run.manifest_path.unlink()
    run.status_path.unlink()
    assert mended(make_runs, run) == []


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_garbage_in_a_document_is_said_and_written_anew(make_runs, cut, name, garbage):
    (cut.path / name).write_bytes(garbage)
    (said,) = mended(make_runs, cut)
    assert said.startswith(f"{name} ") and said.endswith(("is written anew", "is deleted"))
    assert cut.manifest()["repairs"] == [said]
    assert (cut.checkpoint / "step_10.pt").read_text() == "state"
    assert mended(make_runs, cut) == []


@pytest.mark.parametrize("name", DOCUMENTS[:3])
def test_a_document_that_is_gone_is_said_and_written_anew(make_runs, cut, name):
    (cut.path / name).unlink()
    assert mended(make_runs, cut) == [f"{name} was gone, and is written anew"]


@pytest.mark.parametrize("name", [*DOCUMENTS, "log.txt", "metrics.jsonl", "seal.json", "stats.parquet", "checkpoint"])
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_makes_room_and_what_a_link_led_to_stays(make_runs, cut, tmp_path, name, kind):
    path, target = cut.path / name, tmp_path / "kept"
    target.mkdir()
    (target / "step_9.pt").write_text("mine")
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "folder":
        path.write_text("file") if name == "checkpoint" else (path / "inside").mkdir(parents=True)
    else:
        path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    said = mended(make_runs, cut)[0]
    was = {"link": "a link", "pipe": "no file", "folder": "a file" if name == "checkpoint" else "a folder"}[kind]
    assert said.startswith(f"{name} was {was} and is deleted")
    assert (target / "step_9.pt").read_text() == "mine" and not path.is_symlink()


def test_a_link_among_the_checkpoints_goes_and_what_it_led_to_stays(make_runs, cut, tmp_path):
    (tmp_path / "kept").write_text("mine")
    (cut.checkpoint / "step_20.pt").symlink_to(tmp_path / "kept")
    assert mended(make_runs, cut) == ["checkpoint/step_20.pt was a link and is deleted"]
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_put_aside(make_runs, cut):
    shutil.rmtree(cut.path)
    cut.path.write_text("mine")
    (said,) = mended(make_runs, cut)
    aside = cut.path.with_name(f"{cut.name}.aside1")
    assert aside.name in said and aside.read_text() == "mine"


def test_a_link_in_the_place_of_the_folder_goes_and_what_it_led_to_stays(make_runs, cut, tmp_path):
    cut.path.rename(tmp_path / "moved")
    cut.path.symlink_to(tmp_path / "moved")
    (said,) = mended(make_runs, cut)
    assert said.startswith("its folder was a link to ") and not cut.path.is_symlink()
    assert (tmp_path / "moved" / "checkpoint" / "step_10.pt").exists() and not cut.checkpoint.exists()


def test_a_lock_that_is_a_folder_is_replaced_and_one_with_files_is_named(make_runs, cut):
    cut.lock_path.unlink()
    cut.lock_path.mkdir()
    assert mended(make_runs, cut) == [] and cut.lock_path.is_file()
    cut.lock_path.unlink()
    (cut.lock_path / "inside").mkdir(parents=True)
    with pytest.raises(Damaged, match=r"\.lock: is a folder"):
        mended(make_runs, cut)


def test_a_run_at_work_is_left_alone(make_runs, cut):
    cut.manifest_path.write_text("[]")
    with cut.lock():
        repair(cut, pytest.fail)
    assert cut.manifest_path.read_text() == "[]"


@pytest.mark.parametrize("what", ["checkpoint", "folder"])
def test_force_deletes_links_and_never_what_they_lead_to(make_runs, cut, tmp_path, what, monkeypatch):
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    cut.write_status(state="finished", reason=None)
    moved = tmp_path / "moved"
    (cut.checkpoint if what == "checkpoint" else cut.path).rename(moved)
    (cut.checkpoint if what == "checkpoint" else cut.path).symlink_to(moved)
    (status,) = run_local([cut], display=Shown(), force=True)
    assert status["state"] == "finished" and (cut.path / "product").exists()
    target = moved / "step_10.pt" if what == "checkpoint" else moved / "checkpoint" / "step_10.pt"
    assert target.read_text() == "state" and not cut.checkpoint.exists() and not cut.path.is_symlink()
