"""What a job does when Slurm tells it to stop: on to the queue again, unless that would repeat itself for ever."""

import os
import signal

import fake_worker
import pytest

from hqsweep.sweep import process, slurm_job
from hqsweep.sweep.scheduler import Job


@pytest.fixture
def requeued(monkeypatch):
    """Ids of the jobs put back; the job itself is told to stop while its worker runs."""
    names = []
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    monkeypatch.setattr(slurm_job, "requeue_job", names.append)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    return names


def say(monkeypatch, state):
    job = Job(id="6", state=state, reason="", exit_code=0, signal=0, ended_s=0.0)
    monkeypatch.setattr(slurm_job, "find_jobs", lambda ids: {"6": job})


@pytest.fixture
def told_to_stop(monkeypatch):
    class Told(slurm_job.PlainDisplay):
        def update(self, run, status):
            if status["state"] == "running":
                os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(slurm_job, "PlainDisplay", Told)


@pytest.mark.parametrize(
    ("state", "limit_s", "names", "outcome"),
    [
        ("RUNNING", None, ["6"], ("interrupted", "stopped by SIGUSR2")),
        ("RUNNING", 1000.0, ["6"], ("interrupted", "stopped by SIGUSR2")),
        ("RUNNING", 20.0, [], ("failed", "no new checkpoint in the")),
        ("CANCELLED", None, [], ("interrupted", "stopped by SIGUSR2")),
    ],
    ids=["preempted", "long before its limit", "no checkpoint within its limit", "cancelled"],
)
def test_a_stopped_job(make_runs, monkeypatch, requeued, told_to_stop, state, limit_s, names, outcome):
    (run,) = make_runs("sleep")
    say(monkeypatch, state)
    with pytest.raises(SystemExit):
        slurm_job.work([run.path], limit_s, {})
    assert requeued == names
    assert run.status()["state"] == outcome[0] and run.status()["reason"].startswith(outcome[1])


def test_the_exit_code_says_how_the_run_ended(make_runs, requeued):
    good, bad = make_runs("quick", "raise")
    slurm_job.work([good.path], None, {})
    with pytest.raises(SystemExit) as failed:
        slurm_job.work([bad.path], None, {})
    assert failed.value.code == 3 and requeued == []


def test_the_runs_of_a_job_go_on_after_one_that_fails_and_after_one_that_gets_nowhere(
    make_runs, monkeypatch, requeued, told_to_stop
):
    first, *_ = runs = make_runs("sleep", "quick", "quick")
    paths = [run.path for run in runs]
    say(monkeypatch, "RUNNING")
    with pytest.raises(SystemExit):
        slurm_job.work(paths, 20.0, {})
    assert [run.status()["state"] for run in runs] == ["failed", "pending", "pending"] and requeued == ["6"]
    monkeypatch.setattr(slurm_job, "PlainDisplay", fake_worker.PlainDisplay)
    with pytest.raises(SystemExit) as failed:
        slurm_job.work(paths, 20.0, {})
    assert failed.value.code == 3 and len(requeued) == 1
    assert [run.status()["state"] for run in runs] == ["failed", "finished", "finished"]
    assert first.status()["attempt"] == 1
