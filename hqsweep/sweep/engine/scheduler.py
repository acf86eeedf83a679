"""Slurm's jobs, asked for by scontrol alone: many clusters keep no accounts, and there sacct has no answer.

scontrol forgets a job MinJobAge seconds (300 by default) after its end; a job that it does not know is over.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from hqsweep.errors import UserError

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
