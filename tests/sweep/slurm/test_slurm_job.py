"""What a job does when Slurm tells it to stop: on to the queue again, unless that would repeat itself for ever."""

import os
import signal
from types import SimpleNamespace

import pytest
from support.sweep import fake_worker

from hqsweep.sweep.engine import process
from hqsweep.sweep.engine.ranks import nodes_arguments
from hqsweep.sweep.slurm import slurm_job
from hqsweep.sweep.slurm.scheduler import Job


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


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_of_a_job_meet_at_its_first_one_at_a_port_that_its_id_gives(monkeypatch, rank):
    """The first brings the runs to their ends, with the arguments by which their ranks find each other; others help."""
    said, port = [], slurm_job.FIRST_PORT + 70_003 % slurm_job.PORTS

    class Meeting:
        def __init__(self, endpoint, serves):
            said.append(("meets", endpoint, serves))

        def finish(self):
            said.append("finished")

    job = SimpleNamespace(hostnames=["node7", "node8"], global_rank=rank)
    monkeypatch.setattr("submitit.JobEnvironment", lambda: job)
    monkeypatch.setattr(slurm_job, "Meeting", Meeting)
    monkeypatch.setattr(slurm_job, "help_out", lambda *all: said.append(("helps", *all)))
    monkeypatch.setattr(slurm_job, "bring_to_end", lambda paths, limit_s, options: said.append((paths, options)))
    monkeypatch.setenv("SLURM_JOB_ID", "70003")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    slurm_job.work(["run"], None, {"retries": 1})
    endpoint = f"node7:{port}"
    if rank:
        assert said == [("helps", 2, endpoint)]
    else:
        options = {"retries": 1, "nodes": nodes_arguments(2, endpoint)}
        assert said == [("meets", endpoint, True), (["run"], options), "finished"]


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
