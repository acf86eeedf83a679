"""Watching and cancelling runs from a process that need not have started them.

A run reports through status.json, and its Slurm job, if it has one, through the scheduler. Where a job died before its
run wrote how it ended, the last status is written here.

Only scontrol is asked for Slurm's jobs: many clusters keep no accounts, and there sacct has no answer. scontrol
forgets a job MinJobAge seconds (300 by default) after its end; a job that it does not know is over.
"""

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hqsweep.errors import EXIT_FAILED, Damaged, UserError
from hqsweep.host import Busy, holder_pid
from hqsweep.sweep.console import Display, how_far, own_steps
from hqsweep.sweep.engine.task import end_without
from hqsweep.sweep.store.run_dir import CANCELLED, UNUSABLE, RunDir, unusable
from hqsweep.sweep.store.store import MOVE, RunStore

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
"""States of jobs that will not run again (JOB STATE CODES of squeue's manual)."""
ANSWER_S = 60.0
"""Seconds within which a command of Slurm must answer."""


class Unreachable(UserError):
    """Slurm is not here or did not answer; that says nothing about any job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job or a task of an array. exit_code, signal: how its script ended. ended_s: in seconds since 1970."""

    id: str
    state: str
    reason: str
    exit_code: int
    signal: int
    ended_s: float

    @property
    def live(self) -> bool:
        """Whether it runs, or will."""
        return self.state not in ENDED


def find_jobs(ids: Iterable[str]) -> dict[str, Job]:
    """The jobs with these ids ("12" or "12_3") that Slurm still knows. Raises Unreachable."""
    ids = set(ids)
    known: dict[str, Job] = {}
    for array in {name.partition("_")[0] for name in ids}:
        known |= parse_jobs(_ask(["scontrol", "show", "job", "-o", array], gone="Invalid job id"))
    return {name: known[name] for name in ids & known.keys()}


def cancel_jobs(ids: Iterable[str]) -> None:
    """Cancel jobs, whether they wait or run. Raises Unreachable."""
    if names := sorted(ids):
        _ask(["scancel", *names], gone="Invalid job id")


def requeue_job(name: str) -> None:
    """End the running job and put it into the queue again, under the same id. Raises Unreachable."""
    _ask(["scontrol", "requeue", name], gone="Invalid job id")


def parse_jobs(text: str) -> dict[str, Job]:
    """Jobs by id from `scontrol show job -o`; the waiting tasks of an array share a line, as in ArrayTaskId=2-3,7%2."""
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        for name in _names(fields):
            exit_code, _, number = fields.get("ExitCode", "0:0").partition(":")
            jobs[name] = Job(
                id=name, state=fields["JobState"], reason=fields.get("Reason", ""), exit_code=int(exit_code),
                signal=int(number or 0), ended_s=_seconds(fields.get("EndTime", "")),
            )  # fmt: skip
    return jobs


def _names(fields: dict[str, str]) -> list[str]:
    if "ArrayTaskId" not in fields:
        return [fields["JobId"]]
    names = [fields["JobId"]]
    for part in fields["ArrayTaskId"].partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            names += [f"{fields['ArrayJobId']}_{task}" for task in range(int(first), int(last or first) + 1)]
    return names


def _seconds(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def _ask(command: list[str], gone: str) -> str:
    """Output of a command of Slurm; "" when it fails with the words `gone`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise Unreachable(f"Slurm: there is no {command[0]} here; run this where its commands are") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"Slurm: {command[0]} did not answer in {ANSWER_S:g} s; try again") from None
    if done.returncode and gone not in done.stderr:
        raise Unreachable(f"Slurm: {command[0]} failed ({' '.join(done.stderr.split()) or done.returncode}); try again")
    return done.stdout


ASK_S = 3.0
"""The seconds between two questions to the scheduler."""
SILENCE_S = 30.0
"""The additional seconds after a question that it did not answer."""
LAG_S = 30.0
"""The seconds after the end of a job in which a shared file system may still show its run's old status."""
LOOK_AGAIN_S = 0.1
"""The seconds between two looks for the process that has a lock."""
REPORTED = (0, EXIT_FAILED)
"""The exit codes of jobs whose run has written how it ended."""
ENDS = ("finished", "failed")
"""The states in which no job changes anything."""


def job_ids(runs: Sequence[RunDir]) -> dict[RunDir, str]:
    """Run -> the id of its Slurm job; runs without one, or whose file of it is damaged, are left out."""
    return {run: job for run in runs if (job := _job(run)) is not None}


def _job(run: RunDir) -> str | None:
    with suppress(Damaged):
        return run.job()
    return None


def observe(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """The statuses as of now, in the order of `runs`, with dead jobs settled; unusable() for a run that is missing or
    damaged. Raises Unreachable, but not where every run has finished or failed."""
    names = job_ids(runs)
    states = {run: run.seen()["state"] for run in names}
    try:
        jobs = find_jobs(name for run, name in names.items() if states[run] != "finished")
    except Unreachable:
        if not set(states.values()) <= set(ENDS):
            raise
        jobs = {}
    return [_usable(run, jobs) for run in runs]


def _usable(run: RunDir, jobs: Mapping[str, Job]) -> dict[str, Any]:
    try:
        name = run.job()
        return run.seen() if name is None else _observed(run, name, jobs)
    except Damaged as fault:
        return unusable(fault)


def _observed(run: RunDir, name: str, jobs: Mapping[str, Job]) -> dict[str, Any]:
    status, job = run.seen(), jobs.get(name)
    if status["state"] in UNUSABLE:
        return status
    if status["state"] == "finished" or status["reason"] == CANCELLED:
        return status
    if job is not None and job.live:
        if status["state"] == "failed":  # an attempt, after which the job may start another
            return status | {"state": "pending", "reason": f"{status['reason']}; Slurm job {name} goes on"}
        if job.state == "RUNNING" and status["state"] in ("running", "pending"):
            return status
        trunk = run.trunk() if job.reason == "Dependency" else None
        waits = f"waits for {trunk.name}" if trunk else f"Slurm job {name}: {job.reason or job.state}"
        return status | {"state": "pending", "reason": waits}
    return _settle(run, name, job)


def _settle(run: RunDir, name: str, job: Job | None) -> dict[str, Any]:
    """Return the last status of a run whose job is over: the run's own, else one written here."""
    status = run.written_status()
    if status["state"] in (*ENDS, "interrupted"):
        return status
    unstarted = job is not None and job.state == "CANCELLED" and status["state"] == "pending"
    reported = job is not None and job.exit_code in REPORTED and not job.signal and not unstarted
    if reported and time.time() - job.ended_s < LAG_S:
        return status
    try:
        with run.lock():
            status = run.written_status()
            if status["state"] in (*ENDS, "interrupted"):
                return status
            cancelled = job is not None and job.state == "CANCELLED"
            end = "interrupted" if cancelled else "failed", _reason_of_end(name, job)
            state, reason = (_end_with_trunk(run) if status["state"] == "pending" else None) or end
            return run.write_status(
                state=state, reason=reason, ended=time.time(),
                exit_code=None if job is None else job.exit_code or 128 + job.signal,
            )  # fmt: skip
    except Busy:
        return status


def _end_with_trunk(run: RunDir) -> tuple[str, str] | None:
    """The state and the reason of a fork that was not started because its trunk failed or was stopped; None for
    others."""
    trunk = run.trunk()
    if trunk is None or trunk.seen()["state"] not in ("failed", "interrupted"):
        return None
    return end_without(trunk)


def _reason_of_end(name: str, job: Job | None) -> str:
    if job is None:
        return f"its Slurm job {name} is over, and its run wrote no status"
    signal_number = job.signal or (job.exit_code - 128 if job.exit_code > 128 else 0)
    with suppress(ValueError):
        if signal_number:
            return f"Slurm job {name}: {job.state}, killed by {signal.Signals(signal_number).name}"
    return f"Slurm job {name}: {job.state}, exit code {job.exit_code}; see slurm/{name}_0_log.out beside the run"


def status_rows(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Return a row for each run: run, state, step, loss (nats), tokens_per_s, seconds, job (Slurm's id), reason.

    step: "30/200", the work before the first step, or None.
    """
    rows, jobs = [], job_ids(runs)
    for run, status in zip(runs, observe(runs), strict=True):
        progress = status["progress"] or {}
        rows.append({
            "run": run.name, "state": status["state"],
            "step": _step(status),
            "loss": progress.get("loss"), "tokens_per_s": progress.get("tokens_per_s"), "seconds": status["seconds"],
            "job": jobs.get(run), "reason": status["reason"],
        })  # fmt: skip
    return rows


def _step(status: Mapping[str, Any]) -> str | None:
    """Return the progress of a run; before its first step, its present work."""
    progress = status["progress"]
    if status["state"] == "running" and status["phase"]:
        return how_far(status)
    return own_steps(progress) if progress else None


def stranger_row(run: RunDir) -> dict[str, Any]:
    """Return the row of status_rows() for a folder that its sweep does not list, which is therefore not one of its
    runs."""
    empty = dict.fromkeys(("step", "loss", "tokens_per_s", "job"))
    return {"run": run.name, "state": "foreign", **empty, "seconds": 0.0, "reason": f"not in sweep.json; {MOVE}"}


def follow(runs: Sequence[RunDir], display: Display) -> None:
    """Show the runs until none of them runs or waits in a queue. SIGINT does not stop them: SystemExit(130)."""
    with display:
        try:
            while _look(runs, display):
                time.sleep(ASK_S)
        except KeyboardInterrupt:
            display.say("the runs go on; hqsweep status shows them, hqsweep cancel takes them back")
            raise SystemExit(130) from None


def _look(runs: Sequence[RunDir], display: Display) -> bool:
    """Show the runs. Returns whether any of them still runs or waits, as far as is known."""
    try:
        statuses = observe(runs)
    except Unreachable as error:
        display.say(str(error))
        time.sleep(SILENCE_S)
        return True
    for run, status in zip(runs, statuses, strict=True):
        display.update(run.name, status)
    return any(_goes_on(run, status) for run, status in zip(runs, statuses, strict=True))


def _goes_on(run: RunDir, status: Mapping[str, Any]) -> bool:
    waits = status["state"] == "pending" and run.job_path.exists()
    return waits or status["state"] == "running"


def cancel(runs: Sequence[RunDir]) -> list[RunDir]:
    """Cancel the runs that wait or run, and return them, with the forks that share a Slurm job with one of them. A
    worker on this machine gets SIGTERM, and Slurm's jobs end as Slurm ends them. Rows and checkpoints stay, and the
    same command resumes from them.

    Raises Unreachable.
    """
    cancelled = _at_work(runs)
    names = set(job_ids(cancelled).values())
    mates = [run for sweep in {run.sweep_path for run in cancelled} for run in _runs_of(sweep)]
    cancelled += _at_work([run for run, name in job_ids(mates).items() if name in names and run not in cancelled])
    cancel_jobs(names)
    for run in sorted(cancelled, key=RunDir.is_locked):  # those that wait first, lest they start when others end
        deadline = time.monotonic() + LAG_S
        while run.is_locked() and not _terminate(run) and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)
        with suppress(Busy), run.lock(wait_s=max(0.0, deadline - time.monotonic())):
            if run.seen()["state"] not in ENDS:
                run.write_status(state="interrupted", reason=CANCELLED, ended=time.time())
    return cancelled


def _runs_of(sweep: Path) -> list[RunDir]:
    with suppress(Damaged):
        return RunStore(sweep.parent).runs(sweep.name)
    return []


def _at_work(runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that wait or run; also one with a damaged status, if a process works on it."""
    states = [now["state"] for now in observe(runs)]
    return [run for run, state in zip(runs, states, strict=True) if _is_at_work(run, state)]


def _is_at_work(run: RunDir, state: str) -> bool:
    return state in ("pending", "running") or (state in UNUSABLE and run.is_locked())


def _terminate(run: RunDir) -> bool:
    """Send SIGTERM to the run's worker on this machine. Return whether there was a worker.

    Only the holder of the run's lock gets the signal: a worker may have another run by now, and a dead worker's number
    may belong to another process. SIGCONT comes first, since a stopped process receives nothing. The kernel's list of
    locks changes while it is read, so a worker may be missed.
    """
    status, pid = run.seen(), holder_pid(run.lock_path)
    if pid is not None and (status["pid"] == pid or status["state"] in UNUSABLE):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)
            # To its main thread, which is the one that acts on it: of a process that was stopped a moment ago the
            # kernel chooses any thread, and the main one sleeps on.
            return ctypes.CDLL(None).tgkill(pid, pid, int(signal.SIGTERM)) == 0
    return False
