"""run_ranks returns what each rank returned, and raises where one fails; stream_ranks yields as the ranks go on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.ranks import run_ranks

from hqsweep.parallel.wire.spawn import stream_ranks

pytestmark = pytest.mark.slow


def total(rank, offset):
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    if value == 1:
        raise ValueError(f"rank {rank} fails")
    return value


def test_ranks_meet_and_failures_are_raised():
    assert run_ranks(2, total, 5) == [11, 11]
    with pytest.raises(mp.ProcessRaisedException, match=r"rank . fails"):
        run_ranks(2, total, 0)


def counted(rank, path):
    for number in range(100):
        path.with_suffix(f".{rank}.{number}").touch()
        dist.barrier()
        yield 10 * number + rank
        while number and not path.exists():
            time.sleep(0.01)


def test_values_come_while_the_ranks_go_on(tmp_path):
    """Both are at their second value when the caller has the first, and are ended with the caller."""
    values = stream_ranks(2, counted, tmp_path / "go")
    assert next(values) == [0, 1] and next(values) == [10, 11]
    assert mp.active_children() != []
    values.close()
    assert mp.active_children() == []
    assert not list(tmp_path.glob("go.*.3"))


def policies(rank):
    """The scheduling policies of this thread and of gloo's, by their names, after an exchange."""
    dist.barrier()
    tasks = {int(path.name): (path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()}
    wanted = {task: name for task, name in tasks.items() if "gloo" in name} | {os.getpid(): "own"}
    return {name: os.sched_getscheduler(task) for task, name in wanted.items()}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_threads_that_exchange_on_cpus_keep_a_core_until_their_turn_ends():
    for threads in run_ranks(2, policies):
        assert len(threads) > 1 and set(threads.values()) == {os.SCHED_BATCH}


SLEEPERS = """
import os, sys, time
from pathlib import Path
from hqsweep.parallel.wire.spawn import spawn_ranks

def sleep(rank, folder):
    Path(folder, f"{os.getpid()} {os.environ['OF_THE_CALLER']}").touch()
    time.sleep(600)

if __name__ == "__main__":
    os.environ["OF_THE_CALLER"] = "0"
    try:
        spawn_ranks(2, sleep, "none")  # a folder that is not there; from here on there is a server
    except Exception:
        os.environ["OF_THE_CALLER"] = "1"
    spawn_ranks(2, sleep, sys.argv[1])
"""


def lives(pid):
    """Whether a process runs; one that has ended and is not waited for has no command any more."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes() != b""


def test_ranks_have_the_environment_of_their_caller_and_end_with_it(tmp_path):
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    folder = tmp_path / "ranks"
    folder.mkdir()
    caller = subprocess.Popen([sys.executable, tmp_path / "sleepers.py", folder])
    try:
        wait_for(lambda: len(os.listdir(folder)) == 2, 60)
    finally:
        caller.kill()
        caller.wait()
    pids, variables = zip(*(name.split() for name in os.listdir(folder)), strict=True)
    assert variables == ("1", "1")
    wait_for(lambda: not any(map(lives, pids)), 5)


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


IMPORTS = """
import importlib, torch
from hqsweep.parallel.wire.spawn import PRELOADED

def ask(*_, **__):
    raise RuntimeError("a GPU was asked for")

for name in ("is_available", "device_count", "current_device", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, ask)
for name in PRELOADED:
    importlib.import_module(name)
"""


def test_what_the_server_imports_asks_for_no_gpu():
    """Its forks could use none then: CUDA lives in one process."""
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
