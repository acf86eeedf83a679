"""What scontrol prints, as recorded, and what its silence means."""

import pytest

from hqsweep.sweep.engine.follow import Unreachable, find_jobs, parse_jobs

ARRAY = """\
JobId=5 ArrayJobId=5 ArrayTaskId=2-3,7%2 JobName=hqsweep-a JobState=PENDING Reason=JobArrayTaskLimit ExitCode=0:0 EndTime=Unknown
JobId=6 ArrayJobId=5 ArrayTaskId=0 JobName=hqsweep-a JobState=FAILED Reason=NonZeroExitCode ExitCode=137:0 EndTime=2026-11-21T10:00:00
JobId=7 ArrayJobId=5 ArrayTaskId=1 JobName=hqsweep-a JobState=RUNNING Reason=None ExitCode=0:0 EndTime=2026-11-21T11:00:00
"""  # noqa: E501


def test_waiting_tasks_of_an_array_share_a_line():
    jobs = parse_jobs(ARRAY)
    assert {name: job.state for name, job in jobs.items() if "_" in name} == {
        "5_0": "FAILED", "5_1": "RUNNING", "5_2": "PENDING", "5_3": "PENDING", "5_7": "PENDING"
    }  # fmt: skip
    assert (jobs["5_0"].exit_code, jobs["5_0"].signal, jobs["5_0"].live) == (137, 0, False)
    assert jobs["5_0"].ended_s > 0 and jobs["5_7"].ended_s == 0
    assert jobs["5_7"].live and jobs["5_7"].reason == "JobArrayTaskLimit"
    assert jobs["7"].state == "RUNNING"  # by the number that the task has for itself


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """scontrol(script) puts a program of that name on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(script):
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)

    return install


def test_a_forgotten_job_is_no_job_but_a_silent_controller_says_nothing(scontrol):
    with pytest.raises(Unreachable, match="there is no scontrol here"):
        find_jobs(["5_0"])
    scontrol("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert find_jobs(["5_0"]) == {}
    scontrol("echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(Unreachable, match=r"scontrol failed \(Unable to contact slurm controller\); try again"):
        find_jobs(["5_0"])
    assert find_jobs([]) == {}
