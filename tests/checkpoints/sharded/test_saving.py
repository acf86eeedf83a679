"""Saves in the background that fail, in processes whose files may be 1 MiB: what is said, when, and what is left."""

import errno
import subprocess
import sys
import textwrap

import pytest

from hqsweep.checkpoints.sharded.saving import disk_fault, words_of

PROGRAM = """
import resource, torch, hqsweep as hq
m = torch.nn.Linear(1024, 1024)
o = torch.optim.AdamW(m.parameters())
m(torch.randn(2, 1024)).sum().backward()
o.step()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
def refused(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
limit(1 << 20)
saving = hq.save_sharded_async(m, o, "last")
"""
WHY = "a file is larger than the file system or `ulimit -f` allows"
SAID = f"save_sharded_async: 'last' was not saved: {WHY}"


def ended(program, folder):
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(program)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_a_failure_that_nobody_asked_for_is_said_at_the_end(tmp_path, end):
    result = ended(f"import atexit; atexit.register(print, 'called')\n{end}", tmp_path)
    assert (result.returncode, result.stderr, result.stdout) == (120, f"hqsweep: {SAID}\n", "called\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_result_raises_the_reason_and_the_next_save_what_nobody_asked_for(tmp_path):
    program = """
        refused(saving.result)
        refused(lambda: hq.save_sharded(m, o, "whole"))
        saving = hq.save_sharded_async(m, o, "last")
        while not saving.done():
            pass
        limit(hard)
        refused(lambda: hq.save_sharded(m, o, "next"))
        print(*__import__("os").listdir())
        hq.save_sharded_async(m, o, "next").result()
        hq.save_sharded_async(m, o, "more")
    """
    result = ended(program, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    names = ("last", "whole")
    refused = [f"OSError [Errno {errno.EFBIG}] {WHY}: '{name}'" for name in names]
    assert result.stdout.splitlines() == [*refused, f"RuntimeError {SAID}", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more", "next"]


def test_what_the_disk_refuses_is_told_in_plain_words(tmp_path, monkeypatch):
    assert disk_fault(tmp_path / "none") is None and disk_fault(tmp_path) is None
    (tmp_path / "0.distcp").symlink_to("/dev/full")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(full))
    assert words_of(disk_fault(tmp_path)) == "the disk is full"
    assert words_of(ValueError("a\nb")) == "ValueError: a b"
