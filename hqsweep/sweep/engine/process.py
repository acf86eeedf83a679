"""The parent's end of the local engine: a slot's worker process, and each attempt at a run in it, which is started,
watched and stopped; its last status is written here if the worker died first. The worker's end is handover.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from hqsweep.errors import EXIT_STORAGE, Damaged
from hqsweep.host import NAMED_S, Busy, stopped_among
from hqsweep.sweep.engine.handover import GRACE_S, line_of
from hqsweep.sweep.engine.memory import Memory, killed_for_memory
from hqsweep.sweep.store.run_dir import CANCELLED, RunDir

ENDED = ("finished", "failed", "interrupted")
"""The states that a worker writes when it stops."""
DELETED = "its folder was deleted while it ran; the same command starts it again"


def worker_command() -> list[str]:
    """The command of a worker, which takes its runs from stdin and ends itself when its parent is gone; -P: it imports
    nothing from the working directory."""
    return [sys.executable, "-P", "-m", "hqsweep.worker", "--parent", str(os.getpid())]


class WorkerProcess:
    """The process of `worker_command()` with `arguments`, in a session of its own, so that a terminal's Ctrl-C reaches
    the parent alone. `environment` is added to ours; what the process prints before its first run is appended to
    `log`."""

    def __init__(self, environment: Mapping[str, str], log: BinaryIO, arguments: Sequence[str] = ()) -> None:
        self.channel, theirs = socket.socketpair()
        self.answers = True
        """Whether something may still come through the channel."""
        with theirs:
            self._process = subprocess.Popen(
                [*worker_command(), *arguments], env={**os.environ, **environment}, start_new_session=True,
                stdin=theirs, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.pid = self._process.pid
        self.peak_bytes = 0
        """The most memory that it had resident, known when it has ended."""

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell has it, 128 + the signal's number for a worker killed by one; None while it
        lives."""
        code = self._reaped()
        return 128 - code if code is not None and code < 0 else code

    @property
    def killed_by(self) -> signal.Signals | None:
        """The signal that ended it."""
        code = self._reaped()
        return signal.Signals(-code) if code is not None and code < 0 else None

    def _reaped(self, options: int = os.WNOHANG) -> int | None:
        """The exit code, minus the signal's number for one killed by a signal; None while it lives. Popen's own poll()
        drops what the kernel says of a child's memory."""
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self.pid, options)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_bytes = usage.ru_maxrss * 1024
        return self._process.returncode

    def take(self, run: RunDir) -> bool:
        """Hand a run over; returns False when the process was gone. One that dies of the run has had it."""
        if self.exit_code is not None:
            return False
        try:
            self.channel.sendall(line_of(run))
        except OSError:
            return False
        return True

    def finished(self) -> bool:
        """Whether it has reported, since the last call, that its run is finished."""
        try:
            answer = self.channel.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            answer = b""
        self.answers = bool(answer)
        return self.answers

    def terminate(self) -> None:
        """Send SIGTERM to the worker."""
        self._process.terminate()

    def end(self) -> None:
        """Send SIGKILL to the worker and all that it started, if it lives. One that waits for a run loses nothing by
        it."""
        if self._reaped() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._reaped(options=0)
        self.answers = False
        self.channel.close()


@dataclass(eq=False)
class Slot:
    """Room for one run at a time, on the threads and the GPU that `environment` gives, with the worker that waits there
    for the next run: starting Python and torch takes longer than a short run."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    """The arguments of its workers."""
    idle: WorkerProcess | None = None

    def worker_for(self, run: RunDir, log: BinaryIO) -> WorkerProcess:
        """The worker to which the run was handed: the idle one, else a new one."""
        worker, self.idle = self.idle, None
        if worker is None or not worker.take(run):
            if worker is not None:
                worker.end()
            worker = WorkerProcess(self.environment, log, self.arguments)
            worker.take(run)  # one that is dead already is found so
        return worker

    def clear(self) -> None:
        """End the worker that waits here."""
        if self.idle is not None:
            self.idle.end()
            self.idle = None


class Attempt:
    """One attempt at a run, in a worker of the slot. Raises OSError or Damaged when it cannot be started."""

    def __init__(self, run: RunDir, slot: Slot) -> None:
        self.run, self.slot = run, slot
        self._seconds_before = run.written_status()["seconds"]
        self._kills_before = Memory().kills()
        self._began = time.monotonic()
        self._stop: tuple[str, str] | None = None
        self._kill_at = float("inf")
        self._name_at: float | None = None
        self._finished = False
        with run.log.open("ab") as log:
            self._log_start = log.tell()
            self.worker = slot.worker_for(run, log)

    @property
    def seconds(self) -> float:
        """The time since the start, s."""
        return time.monotonic() - self._began

    @property
    def exit_code(self) -> int | None:
        """0 for a run that finished in a worker which lives on, else the worker's exit code; None while it goes on."""
        return 0 if self._finished else self.worker.exit_code

    def alive(self) -> bool:
        """Whether it goes on. A worker that finishes its run is left to the slot, unless it was told to stop: then it
        ends, at the latest with its grace."""
        if self._finished:
            return False
        finished = self.worker.answers and self.worker.finished()
        if finished and self._stop is None:
            self._finished, self.slot.idle = True, self.worker
            return False
        if finished or self.worker.exit_code is not None or time.monotonic() >= self._kill_at:
            self.worker.end()
        return self.worker.exit_code is None

    def stalled(self) -> int | None:
        """The worker's process or the rank that a signal has stopped for NAMED_S seconds by now, reported once each
        time."""
        pid = stopped_among(self.worker.pid)
        if pid is None:
            self._name_at = None
        elif self._name_at is None:
            self._name_at = time.monotonic() + NAMED_S
        elif time.monotonic() >= self._name_at:
            self._name_at = float("inf")
            return pid
        return None

    def stop(self, state: str, reason: str) -> None:
        """Ask the worker to end (SIGTERM). The run becomes `state` for `reason`, unless it finishes first."""
        if self._stop is None:
            self._stop = (state, reason)
            self._kill_at = time.monotonic() + GRACE_S
            self.worker.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the worker and all that it started."""
        self.worker.end()

    def settle(self) -> dict[str, Any]:
        """The final status of an attempt that ended: the one that the worker wrote, else one written here. If another
        worker has taken the run since, it is that worker's; if nothing can be written, it is ours with a note of
        that."""
        state, why = self._stop or ("failed", self._cause_of_death())
        ours = {"state": state, "reason": why, "exit_code": self.exit_code}
        before = self.run.seen()
        if before["state"] == "missing":
            return before | ours | {"state": "failed", "reason": DELETED}
        try:
            with self.run.lock(wait_s=1.0):
                status = self.run.seen()
                spoke = status["pid"] == self.worker.pid and status["state"] in ENDED
                if status["state"] == "finished" or status["reason"] == CANCELLED or (spoke and self._stop is None):
                    return status
                return self.run.write_status(
                    **ours, pid=self.worker.pid, host=socket.gethostname(), ended=time.time(),
                    seconds=round(self._seconds_before + self.seconds, 3),
                )  # fmt: skip
        except Busy:
            return self.run.seen()
        except (OSError, Damaged) as error:
            return before | ours | {"reason": f"{why} (its status cannot be written: {error})"}

    def _cause_of_death(self) -> str:
        if killed_by := self.worker.killed_by:
            for_memory = killed_for_memory(Memory(), self._kills_before, self.worker.peak_bytes)
            return (killed_by == signal.SIGKILL and for_memory) or f"killed by {killed_by.name}"
        if self.exit_code == EXIT_STORAGE:
            return f"cannot write in {self.run.path}; is the disk full or read-only?"
        said = [line.strip() for line in self._log_lines() if line.strip()]
        return f"worker ended with exit code {self.exit_code}" + (f": {said[-1]}" if said else " and said nothing")

    def _log_lines(self) -> list[str]:
        """The lines that the worker has written since the attempt began."""
        try:
            with self.run.log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace").split("\n")
        except OSError:
            return []
