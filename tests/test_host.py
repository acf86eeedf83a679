"""CPUs, files that are written as a whole, and locks with the process that holds them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hqsweep import host
from hqsweep.errors import Damaged
from hqsweep.host import Busy, holder, is_locked, locked, usable_cpus, write_whole

HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); "
HOLD += "time.sleep(60)"


@pytest.fixture
def held(tmp_path):
    """(path, process that holds it)."""
    path = tmp_path / ".lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield path, process
    process.kill()
    process.communicate()


def test_the_holder_is_named_with_what_to_do(held):
    path, process = held
    assert holder(path).startswith(f"{path} is held by process {process.pid} ({sys.executable} -c")
    assert f"`kill {process.pid}` ends it" in holder(path)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert f"which is stopped: `kill -CONT {process.pid}` lets it go on" in holder(path)


def test_who_waits_is_told_and_gives_up_on_a_stopped_holder(held, monkeypatch):
    path, process = held
    monkeypatch.setattr(host, "NAMED_S", 0.1)
    process.send_signal(signal.SIGSTOP)
    said, began = [], time.monotonic()
    with pytest.raises(Busy), locked(path, wait_s=30.0, say=said.append):
        pass
    assert time.monotonic() - began < 10
    assert len(said) == 1 and f"process {process.pid} " in said[0]


def test_a_holder_out_of_sight_is_said_to_be_elsewhere(held, monkeypatch):
    monkeypatch.setattr(host, "holder_pid", lambda path: None)
    assert "on another machine" in holder(held[0])


def test_a_link_or_an_empty_folder_in_the_place_of_a_lock_makes_room(tmp_path):
    path, elsewhere = tmp_path / ".lock", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    path.symlink_to(elsewhere)
    assert not is_locked(path)
    with locked(path):
        assert is_locked(path) and not path.is_symlink()
    path.unlink()
    path.mkdir()
    assert not is_locked(path)
    with locked(path):
        assert path.is_file()
    assert elsewhere.read_text() == "kept"


def test_a_full_folder_in_the_place_of_a_lock_is_named_and_kept(tmp_path):
    path = tmp_path / ".lock"
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(Damaged, match=r"\.lock: is a folder, where a lock belongs"), locked(path):
        pass
    assert (path / "file").exists()


def test_usable_cpus_are_those_that_the_system_allows():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("synced", [False, True])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, synced):
    path, fsync, synced_files = tmp_path / "file", os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda number: synced_files.append(os.fstat(number).st_size) or fsync(number))
    write_whole(path, b"old", synced=synced)
    assert path.read_bytes() == b"old"
    assert synced_files == [3] * synced  # after the data
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            write_whole(path, b"new", synced=synced)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
