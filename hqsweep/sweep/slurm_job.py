"""The work of a Slurm job: the local engine, for one run.

So time-outs, retries and the status of a worker that died are the local engine's, and the job's exit code says how
the run ended: 0 finished, 3 failed. A job that Slurm stops while it wants it to go on (its time is nearly over, or it
is preempted) goes back to the queue, and its next start resumes from the run's checkpoint.
"""

import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from hqsweep.errors import EXIT_FAILED
from hqsweep.sweep.local import Limits, run_local
from hqsweep.sweep.progress import PlainDisplay
from hqsweep.sweep.scheduler import find_jobs, requeue_job
from hqsweep.sweep.store import RunDir

NEAR_LIMIT_S = 30.0
"""How much earlier than announced Slurm may send the signal (it checks in steps of up to a minute)."""


def work(path: Path, limit_s: float | None, options: dict[str, Any]) -> None:
    """Bring the run in folder `path` to an end; `options` are fields of Limits.

    limit_s: seconds after which Slurm tells the job that its time is nearly over; None without a limit. Raises
    SystemExit unless the run finishes.
    """
    run, began, before = RunDir(path), time.monotonic(), _checkpoints(RunDir(path))
    try:
        (status,) = run_local([run], display=PlainDisplay(Console()), limits=Limits(workers=1, **options))
    except SystemExit:
        job = find_jobs([os.environ["SLURM_JOB_ID"]]).get(os.environ["SLURM_JOB_ID"])
        if job is None or job.state != "RUNNING":  # cancelled, or Slurm itself puts it back
            raise
        used_s = time.monotonic() - began
        if limit_s is not None and used_s > limit_s - NEAR_LIMIT_S and _checkpoints(run) == before:
            _give_up(run, used_s)
        requeue_job(job.id)
        raise
    if status["state"] != "finished":
        raise SystemExit(EXIT_FAILED)


def _checkpoints(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoint.glob("step_*.pt"))


def _give_up(run: RunDir, used_s: float) -> None:
    """Fail a run that would be the same in its next job. Raises SystemExit."""
    with run.lock(wait_s=1.0):
        run.write_status(
            state="failed", exit_code=EXIT_FAILED,
            reason=f"no new checkpoint in the {used_s:.0f} s of its Slurm job; raise engine.slurm.time_min or lower"
            " train.checkpoint_every",
        )  # fmt: skip
    raise SystemExit(EXIT_FAILED)
