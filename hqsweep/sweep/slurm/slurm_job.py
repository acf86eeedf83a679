"""The work of a Slurm job: the local engine, for one run, or for the forks of an arm one after another.

So time-outs, retries and the status of a worker that died are the local engine's, and the job's exit code says how the
run ended: 0 finished, 3 failed. A job that Slurm stops although it is to go on (its time is nearly over, or it is
preempted) goes back to the queue, and its next start resumes from the run's checkpoint.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hqsweep.errors import EXIT_FAILED
from hqsweep.sweep.console import SafeConsole
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.nodes import Meeting
from hqsweep.sweep.engine.ranks import help_out, nodes_arguments
from hqsweep.sweep.progress import PlainDisplay
from hqsweep.sweep.slurm.scheduler import find_jobs, requeue_job
from hqsweep.sweep.store.run_dir import RunDir

FIRST_PORT, PORTS = 20_000, 10_000
"""The ports of the first machine of which a job on several machines takes one, by its id."""
NEAR_LIMIT_S = 30.0
"""The seconds by which Slurm may send the signal earlier than announced (it checks in steps of up to a minute)."""


def work(paths: Sequence[Path], limit_s: float | None, options: dict[str, Any]) -> None:
    """Do this machine's part of a job: the first machine brings the runs in these folders to their ends, as
    bring_to_end does; the others launch their ranks of these runs."""
    count = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if count == 1:
        bring_to_end(paths, limit_s, options)
        return
    from submitit import JobEnvironment

    job = JobEnvironment()
    endpoint = f"{job.hostnames[0]}:{FIRST_PORT + int(os.environ['SLURM_JOB_ID']) % PORTS}"
    if job.global_rank:
        help_out(count, endpoint)
        return
    meeting = Meeting(endpoint, serves=True)
    try:
        bring_to_end(paths, limit_s, options | {"nodes": nodes_arguments(count, endpoint)})
    finally:
        meeting.finish()


def bring_to_end(paths: Sequence[Path], limit_s: float | None, options: dict[str, Any]) -> None:
    """Bring the runs in these folders to their ends; `options` are fields of Limits. In a job that was put back, runs
    that failed before are not repeated while others are to be done.

    limit_s: seconds after which Slurm tells the job that its time is nearly over; None without a limit. Raises
    SystemExit unless all runs finish.
    """
    runs, began = [RunDir(path) for path in paths], time.monotonic()
    before = _achieved(runs)
    todo = [run for run in runs if run.seen()["state"] != "failed"] or runs
    try:
        run_local(todo, display=PlainDisplay(SafeConsole()), limits=Limits(workers=1, **options))
    except SystemExit:
        job = find_jobs([os.environ["SLURM_JOB_ID"]]).get(os.environ["SLURM_JOB_ID"])
        if job is None or job.state != "RUNNING":  # cancelled, or Slurm itself puts it back
            raise
        used_s = time.monotonic() - began
        if limit_s is not None and used_s > limit_s - NEAR_LIMIT_S and _achieved(runs) == before:
            _give_up([run for run in todo if run.seen()["state"] == "interrupted"], used_s)
            if not any(run.seen()["state"] == "pending" for run in todo):
                raise SystemExit(EXIT_FAILED) from None
        requeue_job(job.id)
        raise
    if not all(run.has_finished() for run in runs):
        raise SystemExit(EXIT_FAILED)


def _achieved(runs: Sequence[RunDir]) -> list[tuple[bool, list[str]]]:
    """For each run, whether it has ended, and its checkpoints."""
    ends = [run.seen()["state"] in ("finished", "failed") for run in runs]
    checkpoints = [sorted(path.name for path in run.checkpoint.glob("step_*.json")) for run in runs]
    return list(zip(ends, checkpoints, strict=True))


def _give_up(runs: Sequence[RunDir], used_s: float) -> None:
    """Fail the runs at work, which would be the same in the next job."""
    for run in runs:
        with run.lock(wait_s=1.0):
            run.write_status(
                state="failed", exit_code=EXIT_FAILED,
                reason=f"no new checkpoint in the {used_s:.0f} s of its Slurm job; raise engine.slurm.time_min or lower"
                " train.checkpoint_every",
            )  # fmt: skip
