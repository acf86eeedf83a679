"""What is said of runs from outside, and how they are taken back; the scheduler's answers are given."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.sweep import fake_worker

from hqsweep.host import holder_pid
from hqsweep.sweep.engine import follow
from hqsweep.sweep.engine.follow import Job, Unreachable
from hqsweep.sweep.store.files import write_json

LONG_AGO = 1.0


def job(state, *, exit_code=0, number=0, ended_s=LONG_AGO, reason="None"):
    return Job(id="5_0", state=state, reason=reason, exit_code=exit_code, signal=number, ended_s=ended_s)


@pytest.fixture
def run(make_runs):
    (run,) = make_runs("sleep")
    write_json(run.job_path, {"id": "5_0"})
    return run


@pytest.fixture
def slurm(monkeypatch):
    """slurm(job or None) is what Slurm says of job 5_0."""

    def answer(job):
        monkeypatch.setattr(follow, "find_jobs", lambda ids: {"5_0": job} if job and list(ids) else {})

    return answer


RUNNING = {"state": "running", "reason": None, "host": "elsewhere"}


@pytest.mark.parametrize(
    ("written", "state", "outcome"),
    [
        ({}, job("PENDING", reason="Priority"), ("pending", "Slurm job 5_0: Priority")),
        (RUNNING, job("RUNNING"), ("running", None)),
        ({"state": "interrupted"}, job("PENDING", reason="BeginTime"), ("pending", "Slurm job 5_0: BeginTime")),
        ({"state": "interrupted"}, job("COMPLETING"), ("pending", "Slurm job 5_0: None")),
        ({"state": "finished"}, job("COMPLETED"), ("finished", None)),
        ({"state": "failed", "reason": "Oh"}, job("RUNNING"), ("pending", "Oh; Slurm job 5_0 goes on")),
        ({"state": "failed", "reason": "Oh"}, job("FAILED", exit_code=3), ("failed", "Oh")),
        (RUNNING, job("COMPLETED", ended_s=4e9), ("running", None)),
        (RUNNING, job("COMPLETED"), ("failed", "Slurm job 5_0: COMPLETED, exit code 0; see slurm/5_0_0_log.out")),
        (RUNNING, job("FAILED", exit_code=137), ("failed", "Slurm job 5_0: FAILED, killed by SIGKILL")),
        (RUNNING, job("FAILED", number=11), ("failed", "Slurm job 5_0: FAILED, killed by SIGSEGV")),
        (RUNNING, job("NODE_FAIL", exit_code=1), ("failed", "Slurm job 5_0: NODE_FAIL, exit code 1")),
        (RUNNING, job("TIMEOUT", exit_code=0, number=15), ("failed", "Slurm job 5_0: TIMEOUT, killed by SIGTERM")),
        (RUNNING, job("CANCELLED", number=15), ("interrupted", "Slurm job 5_0: CANCELLED")),
        ({"state": "interrupted", "reason": "stopped by SIGTERM"}, job("CANCELLED"), ("interrupted", "stopped by")),
        (RUNNING, None, ("failed", "its Slurm job 5_0 is over, and its run wrote no status")),
    ],
)
def test_a_run_is_what_it_said_or_what_its_job_became(run, slurm, written, state, outcome):
    run.write_status(**written)
    slurm(state)
    (status,) = follow.observe([run])
    assert status["state"] == outcome[0]
    assert (status["reason"] or "").startswith(outcome[1] or "") and bool(status["reason"]) == bool(outcome[1])
    settled = outcome[0] in ("failed", "interrupted", "finished")
    assert (run.written_status()["state"] == outcome[0]) == (settled or not written or written is RUNNING)


@pytest.mark.parametrize(
    ("trunk", "state", "outcome"),
    [
        ({}, job("PENDING", reason="Dependency"), ("pending", "waits for {}")),
        ({"state": "failed", "reason": "Oh"}, job("CANCELLED", ended_s=4e9), ("failed", "its trunk {} failed: Oh")),
        ({"state": "failed", "reason": "Oh"}, None, ("failed", "its trunk {} failed: Oh")),
        ({"state": "interrupted", "reason": "cancelled"}, None, ("interrupted", "its trunk {} was cancelled")),
        ({"state": "finished"}, job("CANCELLED"), ("interrupted", "Slurm job 5_0: CANCELLED")),
    ],
)  # fmt: skip
def test_a_fork_that_was_not_started_says_what_became_of_its_trunk(make_forks, slurm, trunk, state, outcome):
    first, fork, _ = make_forks("trunk", "quick")
    first.write_status(**trunk)
    write_json(fork.job_path, {"id": "5_0"})
    slurm(state)
    (status,) = follow.observe([fork])
    assert status["state"] == outcome[0] and status["reason"].startswith(outcome[1].format(first.name))


def test_a_run_that_somebody_works_on_is_not_declared_dead(run, slurm):
    run.write_status(**RUNNING)
    slurm(None)
    with run.lock():
        assert follow.observe([run])[0]["state"] == "running"


def test_follow_outlasts_a_silent_scheduler_and_ends_with_the_last_run(run, monkeypatch):
    answers = iter([Unreachable("Slurm: no answer"), Unreachable("Slurm: no answer"), {"5_0": job("PENDING")}, {}])

    def find_jobs(ids):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(follow, "find_jobs", find_jobs)
    monkeypatch.setattr(follow, "ASK_S", 0.0)
    monkeypatch.setattr(follow, "SILENCE_S", 0.0)
    said, states = [], []

    class Display(fake_worker.PlainDisplay):
        def say(self, line):
            said.append(line)

        def update(self, run, status):
            states.append(status["state"])

        def __exit__(self, *exception):
            pass

    follow.follow([run], Display(fake_worker.Console()))
    assert said == ["Slurm: no answer"] * 2 and states == ["pending", "failed"]


def test_cancel_takes_a_run_back_that_waits_for_its_next_job(run, slurm, monkeypatch):
    taken = []
    monkeypatch.setattr(follow, "cancel_jobs", taken.extend)
    run.write_status(state="interrupted", reason="stopped by SIGUSR2")
    slurm(job("PENDING", reason="BeginTime"))
    assert follow.cancel([run]) == [run] and taken == ["5_0"]
    assert run.status()["reason"] == "cancelled"


def test_cancel_reaches_what_runs_here_and_what_waits_and_the_parent_goes_home(make_runs, store):
    runs = make_runs("quick", "sleep", "quick")
    command = [sys.executable, fake_worker.__file__, "--sweep", "1", str(store.root / "fakes")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while runs[1].status()["state"] != "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert follow.cancel(runs) == runs[1:]
    parent.communicate(timeout=20)
    assert parent.returncode == 0
    assert [(run.status()["state"], run.status()["reason"]) for run in runs] == [
        ("finished", None), ("interrupted", "cancelled"), ("interrupted", "cancelled")
    ]  # fmt: skip


def test_cancel_finds_the_worker_by_what_it_has_locked_not_by_what_it_was_started_for(make_runs, store):
    runs = make_runs("quick", "sleep", "quick")
    command = [sys.executable, fake_worker.__file__, "--sweep", "1", str(store.root / "fakes")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while runs[1].status()["state"] != "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert runs[0].status()["pid"] == runs[1].status()["pid"]
    assert follow.cancel([runs[1]]) == [runs[1]]
    parent.communicate(timeout=20)
    assert [(run.status()["state"], run.status()["reason"]) for run in runs] == [
        ("finished", None), ("interrupted", "cancelled"), ("finished", None)
    ]  # fmt: skip


def test_cancel_never_signals_a_process_that_has_the_number_of_a_dead_worker(make_runs):
    (run,) = make_runs("sleep")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.write_status(state="running", pid=other.pid, host=socket.gethostname())
        with run.lock():
            follow._terminate(run)
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_a_failed_run_is_shown_where_there_is_no_scheduler(run, monkeypatch):
    def unreachable(ids):
        raise Unreachable("Slurm: there is no scontrol here")

    monkeypatch.setattr(follow, "find_jobs", unreachable)
    run.write_status(state="failed", reason="Oh")
    assert [status["state"] for status in follow.observe([run])] == ["failed"]
    run.write_status(state="running")
    with pytest.raises(Unreachable, match="no scontrol"):
        follow.observe([run])


@pytest.mark.slow
@pytest.mark.parametrize("misses", [0, 2])
def test_cancel_ends_a_worker_that_is_stopped(make_runs, store, monkeypatch, misses):
    """The kernel's list of locks may lack its lock at the first looks, and on a busy machine another of its threads may
    be awake before the one that acts on signals."""
    looks = iter(range(misses))
    monkeypatch.setattr(follow, "holder_pid", lambda path: None if next(looks, None) is not None else holder_pid(path))
    (run,) = make_runs("sleep")
    command = [sys.executable, fake_worker.__file__, "--sweep", "1", str(store.root / "fakes")]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while run.status()["state"] != "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(run.status()["pid"], signal.SIGSTOP)
    began = time.monotonic()
    assert follow.cancel([run]) == [run] and time.monotonic() - began < 5
    parent.communicate(timeout=20)
    assert run.status()["reason"] == "cancelled"


GARBAGE = [
    "",
    "[]",
    "{",
    "null",
    '{"state": 3}',
    '{"state": "running", "progress": {}}',
    '{"state": "\\ud800"}',
    "\xff",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_one_damaged_run_never_stops_the_look_at_the_others(make_runs, garbage):
    bad, good, gone = make_runs("quick", "quick", "quick")
    bad.status_path.write_bytes(garbage.encode("latin-1"))
    shutil.rmtree(gone.path)
    first, second, third = follow.status_rows([bad, good, gone])
    assert first["state"] == "damaged" and first["reason"].startswith(f"{bad.status_path}: ")
    assert (second["state"], third["state"]) == ("pending", "missing")
    assert follow.cancel([bad, good, gone]) == [good]


def test_a_damaged_name_of_a_job_is_named(run):
    run.job_path.write_text('{"id": 5}')
    (row,) = follow.status_rows([run])
    assert row["state"] == "damaged" and "job.json: has 5 under 'id', where text belongs" in row["reason"]


def test_what_a_run_is_at_stands_where_its_steps_will(make_runs):
    (run,) = make_runs("quick")
    with run.lock():
        run.write_status(state="running", phase="loading data")
        assert follow.status_rows([run])[0]["step"] == "loading data"
        run.write_status(phase=None, progress={"step": 3, "steps": 9, "loss": 1.0, "tokens_per_s": None, "eta_s": None})
        assert follow.status_rows([run])[0]["step"] == "3/9"
