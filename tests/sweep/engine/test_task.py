"""Forks wait for their trunks, without a slot, and end with the trunk that fails; with workers that need no torch."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.sweep import fake_worker
from support.sweep.shown import Shown

from hqsweep.sweep.engine import follow, process
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.task import end_without
from hqsweep.sweep.store import seal
from hqsweep.sweep.store.run_dir import CANCELLED


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    monkeypatch.setattr(process, "GRACE_S", 0.5)


def states(runs):
    return [run.status()["state"] for run in runs]


def starts(run):
    path = run.path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ({"state": "running", "host": "elsewhere"}, None),
        ({"state": "failed", "reason": "loss is nan"}, ("failed", "its trunk {} failed: loss is nan")),
        ({"state": "finished"}, ("failed", "its trunk {} is finished, and its state at this point is gone; run again")),
        ({"state": "interrupted", "reason": CANCELLED}, ("interrupted", "its trunk {} was cancelled")),
        ({"state": "interrupted", "reason": "stopped by SIGTERM"},
         ("interrupted", "its trunk {} is interrupted: stopped by SIGTERM")),
        ({"state": "pending"}, ("interrupted", "its trunk {} is pending")),
    ],
)  # fmt: skip
def test_what_becomes_of_a_fork_without_its_trunks_state(make_forks, status, end):
    (trunk,) = make_forks("trunk")
    trunk.write_status(**status)
    assert end_without(trunk) == (end and (end[0], end[1].format(trunk.name)))


@pytest.mark.slow
def test_the_next_trunk_trains_ahead_and_forks_start_while_their_trunk_goes_on(make_forks, make_runs):
    runs = make_forks("trunk", "quick", "quick", seeds=2)
    display = Shown()
    run_local([*trunk_by_trunk(runs), *make_runs("quick")], display=display, limits=Limits(workers=2))
    assert states(runs) == ["finished"] * 10 and [starts(run) for run in runs] == [1] * 10
    assert set(display.order("running")[:2]) == {run.name for run in runs[:2]}
    assert display.lines[0] == "8 forks wait for 2 trunks"
    waits = {(run.name, "pending", f"waits for {run.trunk().name}") for run in runs[2:]}
    assert waits <= set(display.shown)
    first_point = next(run for run in runs if run.trunk() == runs[0] and run.fork().start == 1)
    shown = [entry[:2] for entry in display.shown]
    assert shown.index((first_point.name, "pending")) < shown.index((runs[0].name, "finished"))


def trunk_by_trunk(runs):
    """Each trunk, then its forks, in the order of `runs`."""
    trunks = [run for run in runs if run.trunk() is None]
    return [run for trunk in trunks for run in (trunk, *(fork for fork in runs if fork.trunk() == trunk))]


@pytest.mark.slow
def test_one_worker_does_every_fork_of_a_trunk_before_the_next_trunk(make_forks, make_runs):
    runs = trunk_by_trunk(make_forks("trunk", "quick", "quick", seeds=2))
    display = Shown()
    run_local([*runs, *make_runs("quick")], display=display, limits=Limits(workers=1))
    assert states(runs) == ["finished"] * 10
    assert display.order("finished")[:10] == [run.name for run in runs]


@pytest.mark.slow
def test_a_run_that_is_tried_again_keeps_its_place(make_runs):
    runs, display = make_runs("flaky", "quick", "quick"), Shown()
    run_local(runs, display=display, limits=Limits(workers=1, retries=2, backoff_s=0))
    assert display.order("finished") == [run.name for run in runs]


@pytest.mark.slow
def test_no_slot_is_held_by_what_waits(make_forks, make_runs):
    runs = make_forks("trunk-sleeps", "quick")
    others = make_runs("quick", "quick")
    parent_limits = Limits(workers=2, timeout_s=3)
    run_local([*runs, *others], display=Shown(), limits=parent_limits)
    assert states(others) == ["finished"] * 2
    assert states(runs) == ["failed", "finished", "failed"]
    assert runs[2].status()["reason"] == f"its trunk {runs[0].name} failed: timed out after 3 s"


@pytest.mark.slow
def test_a_failed_trunk_says_so_burns_no_retries_of_its_forks_and_is_repeated_with_them(make_forks):
    trunk, *forks = runs = make_forks("trunk-fails", "quick", "quick")
    display = Shown()
    began = time.monotonic()
    run_local(runs, display=display, limits=Limits(workers=1, retries=1, backoff_s=0.1))
    assert time.monotonic() - began < 20
    reason = f"its trunk {trunk.name} failed: RuntimeError: out of luck"
    assert [(r.status()["state"], r.status()["reason"]) for r in forks] == [("finished", None), ("failed", reason)] * 2
    assert (starts(trunk), [starts(fork) for fork in forks]) == (2, [1, 0, 1, 0])
    (trunk.path / "mended").touch()
    run_local(runs, display=display, limits=Limits(workers=1))
    assert states(runs) == ["finished"] * 5 and [starts(fork) for fork in forks] == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_trunk_that_is_killed_midway_is_retried_while_its_forks_wait(make_forks):
    runs = make_forks("trunk-dies", "quick")
    run_local(runs, display=Shown(), limits=Limits(workers=2, retries=1, backoff_s=0.1))
    assert states(runs) == ["finished"] * 3 and [starts(run) for run in runs] == [2, 1, 1]


@pytest.mark.slow
def test_force_repeats_the_trunk_before_its_forks(make_forks):
    runs = make_forks("trunk", "quick")
    run_local(runs, display=Shown(), limits=Limits(workers=2))
    run_local(runs, display=Shown(), limits=Limits(workers=2), force=True)
    assert states(runs) == ["finished"] * 3 and [starts(run) for run in runs] == [1] * 3
    for fork in runs[1:]:
        assert (fork.path / "starts").stat().st_mtime_ns >= fork.trunk_state().stat().st_mtime_ns


@pytest.mark.slow
def test_a_cancelled_trunk_takes_its_waiting_forks_along(make_forks, store):
    trunk, first, _ = runs = make_forks("trunk-sleeps", "quick")
    parent = start_parent(store)
    wait_for(lambda: first.status()["state"] == "finished")
    assert follow.cancel([trunk]) == [trunk]
    parent.communicate(timeout=20)
    assert [run.status()["reason"] for run in runs] == [CANCELLED, None, f"its trunk {trunk.name} was cancelled"]
    assert states(runs) == ["interrupted", "finished", "interrupted"]


@pytest.mark.slow
def test_two_parents_wait_for_the_same_trunk(make_forks, store):
    runs = make_forks("trunk", "quick", "quick")
    parents = [start_parent(store), start_parent(store)]
    said = [parent.communicate(timeout=30)[0] for parent in parents]
    assert [parent.returncode for parent in parents] == [0, 0], said
    assert states(runs) == ["finished"] * 5 and [starts(run) for run in runs] == [1] * 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "worker", "both"])
def test_a_fork_study_goes_on_after_a_kill_of_its_trunk(make_forks, store, victim):
    trunk, first, second = runs = make_forks("trunk-sleeps", "quick")
    parent = start_parent(store)
    wait_for(lambda: first.status()["state"] == "finished" and trunk.status()["state"] == "running")
    for number in {"parent": [parent.pid], "worker": [trunk.status()["pid"]]}.get(
        victim, [parent.pid, trunk.status()["pid"]]
    ):
        os.kill(number, signal.SIGKILL)
    parent.communicate(timeout=20)
    wait_for(lambda: not trunk.is_locked())
    assert second.status()["state"] == ("failed" if victim == "worker" else "pending")
    seal.remove(trunk.path)  # of a failed one
    trunk.config_path.write_text(trunk.config_path.read_text().replace("trunk-sleeps", "trunk"))
    assert start_parent(store).wait(timeout=20) == 0
    assert states(runs) == ["finished"] * 3 and [starts(run) for run in runs] == [2, 1, 1]


@pytest.mark.slow
def test_fail_fast_starts_nothing_after_the_first_failure(make_runs):
    runs = make_runs("short", "raise", "quick", "quick")
    display = Shown()
    run_local(runs, display=display, limits=Limits(workers=2, retries=1, backoff_s=0.1, fail_fast=True))
    assert states(runs)[:2] == ["finished", "failed"] and starts(runs[1]) == 2
    left = states(runs).count("pending")
    if left:
        assert (
            f"{runs[1].name}: RuntimeError: out of luck; {left} runs are not started (engine.fail_fast)"
            in display.lines
        )
    runs = make_runs("short", "raise", "quick", "quick", "sleep")
    run_local(runs[1:], display=display, limits=Limits(fail_fast=True))
    assert states(runs)[4] == "pending" and starts(runs[4]) == 0


def start_parent(store):
    command = [sys.executable, fake_worker.__file__, "--sweep", "2", str(store.root / "fakes")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
