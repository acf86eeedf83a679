"""The engine with workers that need no torch (fake_worker.py)."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.sweep import fake_worker
from support.sweep.shown import Shown

from hqsweep.host import stopped_among
from hqsweep.sweep.engine import local, process
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    monkeypatch.setattr(process, "GRACE_S", 0.5)


def starts(run: RunDir) -> list[str]:
    path = run.path / "starts"
    return path.read_text().splitlines() if path.exists() else []


def outcomes(statuses) -> list[tuple[str, str | None]]:
    return [(status["state"], status["reason"]) for status in statuses]


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_runs_die_each_in_its_way_and_the_others_finish(make_runs):
    runs = make_runs("quick", "segv", "kill", "raise", "exit", "quick")
    statuses = run_local(runs, display=Shown(), limits=Limits(workers=2))
    assert outcomes(statuses) == [
        ("finished", None),
        ("failed", "killed by SIGSEGV"),
        ("failed", "killed by SIGKILL"),
        ("failed", "RuntimeError: out of luck"),
        ("failed", "worker ended with exit code 1: ModuleNotFoundError: no module named spam"),
        ("finished", None),
    ]
    assert [status["exit_code"] for status in statuses] == [0, 139, 137, 3, 1, 0]
    assert "boring line" in runs[4].log.read_text()


def test_a_worker_does_one_run_after_another_until_one_does_not_finish(make_runs):
    runs = make_runs("quick", "quick", "exit", "quick", "raise", "quick", "kill", "quick", "quick")
    statuses = run_local(runs, display=Shown())
    states = ["finished", "finished", "failed", "finished", "failed", "finished", "failed", "finished", "finished"]
    assert [status["state"] for status in statuses] == states
    pids = [status["pid"] for status in statuses]
    assert pids == [pids[0]] * 3 + [pids[3]] * 2 + [pids[5]] * 2 + [pids[7]] * 2 and len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_run_that_ends_its_worker_at_once_is_not_started_again(make_runs, monkeypatch):
    """By the time that the parent looks, the worker has died of the run that it was handed."""
    looked = process.WorkerProcess.exit_code.fget
    monkeypatch.setattr(process.WorkerProcess, "exit_code", property(lambda self: (time.sleep(0.3), looked(self))[1]))
    runs = make_runs("quick", "exit")
    first, second = run_local(runs, display=Shown())
    assert second["state"] == "failed" and first["pid"] == second["pid"]


def test_each_run_of_a_worker_writes_to_its_own_log(make_runs):
    runs = make_runs("say", "say")
    pids = [status["pid"] for status in run_local(runs, display=Shown())]
    assert pids[0] == pids[1]
    assert [run.log.read_text() for run in runs] == [f"{run.name} by Python\n{run.name} by a child\n" for run in runs]


def test_a_worker_that_dies_while_it_waits_costs_no_run(make_runs, monkeypatch):
    runs = make_runs("quick", "quick")

    def worker_for(slot, run, log, original=process.Slot.worker_for):
        if slot.idle is not None:
            os.kill(slot.idle.pid, signal.SIGKILL)
            os.waitid(os.P_PID, slot.idle.pid, os.WEXITED | os.WNOWAIT)
        return original(slot, run, log)

    monkeypatch.setattr(process.Slot, "worker_for", worker_for)
    first, second = run_local(runs, display=Shown())
    assert (second["state"], second["attempt"]) == ("finished", 1) and first["pid"] != second["pid"]


def test_a_run_taken_up_again_is_pending_until_its_worker_speaks(make_runs):
    (run,) = make_runs("exit")
    run.write_status(state="failed", reason="an old one", progress={"step": 3, "steps": 9})
    display = Shown()
    statuses = run_local([run], display=display)
    assert [state for _, state in display.states][:2] == ["failed", "pending"]
    assert statuses[0]["reason"].startswith("worker ended with exit code 1")


def test_a_number_of_threads_in_the_environment_is_not_read_and_that_is_said(make_runs, monkeypatch):
    for asked, said in (("77", 1), ("2", 0)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        display = Shown()
        run_local(make_runs("quick"), display=display, limits=Limits(threads=None if said else 2))
        assert sum(f"OMP_NUM_THREADS={asked} is not read" in line for line in display.lines) == said


def test_the_same_call_again_repeats_only_what_is_not_finished(make_runs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    runs = make_runs("quick", "segv", "quick")
    run_local(runs, display=Shown())
    display = Shown()
    run_local(runs, display=display)
    assert [len(starts(run)) for run in runs] == [1, 2, 1]
    assert display.lines[0] == "2 of 3 runs are finished already and skipped; --force repeats them"
    assert {run for run, _ in display.states} == {run.name for run in runs}


def test_force_deletes_and_repeats(make_runs):
    runs = make_runs("quick", "quick")
    run_local(runs, display=Shown())
    (runs[0].path / "metrics.jsonl").write_text("old")
    statuses = run_local(runs, display=Shown(), force=True)
    assert [status["attempt"] for status in statuses] == [1, 1]
    assert not (runs[0].path / "metrics.jsonl").exists()


def test_retries_go_on_until_the_run_finishes_or_they_are_used_up(make_runs):
    runs = make_runs("flaky", "raise")
    display = Shown()
    began = time.monotonic()
    statuses = run_local(runs, display=display, limits=Limits(workers=2, retries=2, backoff_s=0.2))
    assert time.monotonic() - began > 0.2 + 0.4
    assert outcomes(statuses) == [("finished", None), ("failed", "RuntimeError: out of luck")]
    assert [len(starts(run)) for run in runs] == [3, 3]
    for wait in ("0.2", "0.4"):
        assert f"{runs[1].name}: RuntimeError: out of luck; trying again in {wait} s" in display.lines


def test_time_out_ends_willing_and_stubborn_workers(make_runs):
    runs = make_runs("sleep", "stubborn", "quick")
    began = time.monotonic()
    statuses = run_local(runs, display=Shown(), limits=Limits(workers=3, timeout_s=2.5))
    assert outcomes(statuses) == [("failed", "timed out after 2.5 s")] * 2 + [("finished", None)]
    assert time.monotonic() - began < 15
    assert 2.5 <= statuses[0]["seconds"] < 15


def test_threads_are_shared_out(make_runs, monkeypatch):
    monkeypatch.setattr(local, "usable_cpus", lambda: 7)
    monkeypatch.setattr(process, "visible_gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = make_runs("quick", "quick")
    run_local(runs[:1], display=Shown(), limits=Limits(workers=2))
    run_local(runs[1:], display=Shown(), limits=Limits(workers=2, threads=5))
    assert [starts(run) for run in runs] == [["3 None"], ["5 None"]]


def test_runs_share_a_gpu_as_far_as_allowed(make_runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    runs = make_runs(*["short"] * 6)
    run_local(runs, display=Shown(), limits=Limits(runs_per_gpu=2, threads=1))
    assert sorted(starts(run)[0] for run in runs[:4]) == ["1 0", "1 0", "1 1", "1 1"]


def test_an_error_of_the_display_leaves_no_worker_behind(make_runs):
    class Broken(Shown):
        def update(self, run, status):
            if status["state"] == "running":
                raise BrokenPipeError

    (run,) = make_runs("sleep")
    with pytest.raises(BrokenPipeError):
        run_local([run], display=Broken())
    assert not run.is_locked()
    assert run.status()["state"] == "interrupted"


def start_parent(store: RunStore, workers: int) -> subprocess.Popen:
    command = [sys.executable, fake_worker.__file__, "--sweep", str(workers), str(store.root / "fakes")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_interrupts_the_sweep_and_it_can_go_on(store, make_runs, number, code):
    runs = make_runs("quick", "sleep", "quick")
    parent = start_parent(store, 1)
    wait_for(lambda: runs[1].status()["state"] == "running")
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=10)
    assert parent.returncode == code
    assert f"stopped by {number.name}; the same command goes on from here" in output
    assert [run.status()["state"] for run in runs] == ["finished", "interrupted", "pending"]


def test_a_second_signal_kills_a_stubborn_worker_at_once(store, make_runs):
    (run,) = make_runs("stubborn")
    parent = start_parent(store, 1)  # a process of its own, where the grace is 10 s
    wait_for(lambda: run.status()["state"] == "running")
    time.sleep(0.1)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=5)
    assert parent.returncode == 130
    assert outcomes([run.status()]) == [("interrupted", "stopped by SIGINT")]


def test_workers_do_not_outlive_a_killed_parent(store, make_runs):
    (run,) = make_runs("sleep")
    parent = start_parent(store, 1)
    wait_for(lambda: run.status()["state"] == "running")
    parent.kill()
    parent.communicate()
    wait_for(lambda: not run.is_locked(), seconds=5)
    assert outcomes([run.status()]) == [("interrupted", "stopped by SIGTERM")]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sweep_killed_at_random_moments_finishes_without_repeating_finished_runs(store, make_runs, seed):
    runs = make_runs(*["short"] * 6)
    moment = random.Random(seed)
    done: dict[Path, int] = {}
    for _ in range(3):
        parent = start_parent(store, 2)
        time.sleep(moment.uniform(0.3, 1.5))
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
        assert all(len(starts(run)) == done[run.path] for run in runs if run.path in done)
        done |= {run.path: len(starts(run)) for run in runs if run.status()["state"] == "finished"}
    statuses = run_local(store.runs("fakes"), display=Shown(), limits=Limits(workers=2))
    assert [status["state"] for status in statuses] == ["finished"] * 6
    assert all(len(starts(run)) == done[run.path] for run in runs if run.path in done)


def test_two_parents_share_a_sweep(store, make_runs):
    runs = make_runs(*["short"] * 5)
    parents = [start_parent(store, 2) for _ in range(2)]
    for parent in parents:
        parent.communicate(timeout=20)
        assert parent.returncode == 0
    assert [(run.status()["state"], len(starts(run))) for run in runs] == [("finished", 1)] * 5


def in_a_thread(call):
    """Start the call beside the engine, which needs the main thread."""
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_folder_that_is_deleted_while_its_run_goes_on_costs_that_run_alone(make_runs):
    runs = make_runs("sleep", "short", "short")

    def delete():
        wait_for(lambda: runs[0].seen()["state"] == "running")
        shutil.rmtree(runs[0].path)

    display, began = Shown(), time.monotonic()
    deleting = in_a_thread(delete)
    statuses = run_local(runs, display=display, limits=Limits(workers=2))
    deleting.join()
    assert time.monotonic() - began < 30  # the run itself would take a minute
    assert [status["state"] for status in statuses] == ["missing", "finished", "finished"]
    assert display.reasons[runs[0].name] == "its folder was deleted while it ran; the same command starts it again"
    assert not runs[0].path.exists()
    again = make_runs("quick", "short", "short")
    assert [status["state"] for status in run_local(again[1:], display=Shown())] == ["finished"] * 2


def test_a_worker_that_finds_its_folder_deleted_is_no_busy_one(make_runs):
    (run,) = make_runs("gone")
    display = Shown()
    run_local([run], display=display)
    assert display.reasons[run.name].startswith("its folder was deleted while it ran")


def test_a_folder_that_is_deleted_before_its_run_starts_is_named(make_runs):
    runs = make_runs("quick", "quick")
    shutil.rmtree(runs[0].path)
    display = Shown()
    run_local(runs, display=display)
    assert display.reasons[runs[0].name].startswith("its folder was deleted before") and runs[1].has_finished()


@pytest.mark.parametrize("garbage", ["[]", "", "{", '{"state": "running", "progress": []}'])
def test_garbage_in_the_status_of_a_run_at_work_costs_nothing(make_runs, garbage):
    runs = make_runs("waits", "quick")

    def spoil():
        wait_for((runs[0].path / "waits").exists)
        runs[0].status_path.write_text(garbage)
        (runs[0].path.parent / "go").touch()

    spoiling = in_a_thread(spoil)
    statuses = run_local(runs, display=Shown())
    spoiling.join()
    assert [status["state"] for status in statuses] == ["finished"] * 2


def test_a_stopped_worker_of_a_killed_parent_is_named_and_its_run_goes_on_without_it(make_runs, store, monkeypatch):
    monkeypatch.setattr(local, "NAMED_S", 0.3)
    (run,) = make_runs("again")
    parent = start_parent(store, 1)
    wait_for(lambda: run.status()["state"] == "running")
    pid = run.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    display = Shown()

    def end():
        try:
            wait_for(lambda: any(f"process {pid} " in line for line in display.lines))
        finally:
            os.kill(pid, signal.SIGKILL)

    ending = in_a_thread(end)
    (status,) = run_local([run], display=display)
    ending.join()
    assert status["state"] == "finished" and status["attempt"] == 2
    busy, named = [line for line in display.lines if run.name in line]
    assert busy.endswith("another process works on it; waiting for that")
    assert f"held by process {pid} (" in named and f"which is stopped: `kill -CONT {pid}`" in named


def test_an_own_worker_that_somebody_stops_is_named(make_runs, monkeypatch):
    monkeypatch.setattr(process, "NAMED_S", 0.3)
    (run,) = make_runs("short")
    display = Shown()

    def stop():
        wait_for(lambda: run.seen()["state"] == "running")
        os.kill(run.seen()["pid"], signal.SIGSTOP)
        try:
            wait_for(lambda: any("is stopped" in line for line in display.lines))
        finally:
            os.kill(run.seen()["pid"], signal.SIGCONT)

    stopping = in_a_thread(stop)
    (status,) = run_local([run], display=display)
    stopping.join()
    assert status["state"] == "finished" and any("is stopped; `kill -CONT" in line for line in display.lines)


def test_a_stopped_rank_is_named_beside_its_worker():
    """Ranks are forks of a server of the run's worker, and the others wait for one that is stopped."""
    server = "sh -c 'sleep 60 & echo $!; wait'; true"
    worker = subprocess.Popen(["sh", "-c", server], stdout=subprocess.PIPE, text=True)
    rank = int(worker.stdout.readline())
    try:
        assert stopped_among(worker.pid) is None
        os.kill(rank, signal.SIGSTOP)
        wait_for(lambda: stopped_among(worker.pid) == rank)
        os.kill(worker.pid, signal.SIGSTOP)
        wait_for(lambda: stopped_among(worker.pid) == worker.pid)
    finally:
        os.kill(rank, signal.SIGKILL)
        worker.kill()
        worker.communicate()


def test_a_kill_for_memory_is_told_from_other_kills(make_runs, monkeypatch):
    kills = iter([5, 6])
    monkeypatch.setattr(process.Memory, "kills", lambda memory: next(kills))
    (status,) = run_local(make_runs("kill"), display=Shown())
    assert status["reason"].startswith("killed for memory: ") and "fewer engine.workers" in status["reason"]
    assert "had 0.0 GiB" not in status["reason"]
