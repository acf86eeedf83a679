"""The lock of a folder, and what is said of a process that keeps it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hqsweep.errors import Damaged
from hqsweep.sweep.store import locks
from hqsweep.sweep.store.locks import RunBusy, holder, is_locked, locked

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
    monkeypatch.setattr(locks, "NAMED_S", 0.1)
    process.send_signal(signal.SIGSTOP)
    said, began = [], time.monotonic()
    with pytest.raises(RunBusy), locked(path, wait_s=30.0, say=said.append):
        pass
    assert time.monotonic() - began < 10
    assert len(said) == 1 and f"process {process.pid} " in said[0]


def test_a_holder_out_of_sight_is_said_to_be_elsewhere(held, monkeypatch):
    monkeypatch.setattr(locks, "holder_pid", lambda path: None)
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
