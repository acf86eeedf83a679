"""One worker process of the local engine: started, watched, stopped, and its last status written if it died first.

The parent's end is WorkerProcess; the worker's end is stop_with_parent.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hqsweep.errors import EXIT_STORAGE
from hqsweep.sweep.locks import RunBusy
from hqsweep.sweep.store import CANCELLED, RunDir

GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL, in which a worker writes its status."""
PARENT_LOOK_S = 0.5
ENDED = ("finished", "failed", "interrupted")
"""States that a worker writes when it stops."""


def worker_command(run: RunDir) -> list[str]:
    """The command of a run's worker, which ends itself when its parent is gone."""
    return [sys.executable, "-m", "hqsweep.worker", str(run.path), "--parent", str(os.getpid())]


def stop_with_parent(parent: int) -> None:
    """From now on, stop this process when process `parent` is no longer its parent: SIGTERM, then SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class WorkerProcess:
    """`worker_command(run)` in a session of its own, so that a terminal's Ctrl-C reaches the parent alone; stdout and
    stderr are appended to the run's log. `environment` is added to ours."""

    def __init__(self, run: RunDir, environment: Mapping[str, str]) -> None:
        self.run = run
        self._seconds_before = run.written_status()["seconds"]
        self._began = time.monotonic()
        self._stop: tuple[str, str] | None = None
        self._kill_at = float("inf")
        with run.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                worker_command(run), env={**os.environ, **environment}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Time since the start, s."""
        return time.monotonic() - self._began

    @property
    def exit_code(self) -> int | None:
        """As a shell has it, 128 + the signal's number for a worker killed by one; None while it lives."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def alive(self) -> bool:
        """Whether it lives; one that outlives its grace after `stop` is killed here."""
        if self.exit_code is None and time.monotonic() >= self._kill_at:
            self.kill()
        return self.exit_code is None

    def stop(self, state: str, reason: str) -> None:
        """Ask the worker to end (SIGTERM). The run becomes `state` for `reason`, unless it finishes first."""
        if self._stop is None:
            self._stop = (state, reason)
            self._kill_at = time.monotonic() + GRACE_S
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the worker and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def settle(self) -> dict[str, Any]:
        """Final status of an ended worker's run: the one that the worker wrote, else one written here. Where another
        worker has taken the run since, that worker's; where nothing can be written, ours with a note of that."""
        state, reason = self._stop or ("failed", self._cause_of_death())
        ours = {"state": state, "reason": reason, "exit_code": self.exit_code}
        try:
            with self.run.lock(wait_s=1.0):
                status = self.run.written_status()
                spoke = status["pid"] == self._process.pid and status["state"] in ENDED
                if status["state"] == "finished" or status["reason"] == CANCELLED or (spoke and self._stop is None):
                    return status
                return self.run.write_status(
                    **ours, pid=self._process.pid, host=socket.gethostname(), ended=time.time(),
                    seconds=round(self._seconds_before + self.seconds, 3),
                )  # fmt: skip
        except RunBusy:
            return self.run.written_status()
        except OSError as error:
            return self.run.written_status() | ours | {"reason": f"{reason} (its status cannot be written: {error})"}

    def _cause_of_death(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code == EXIT_STORAGE:
            return f"cannot write in {self.run.path}; is the disk full or read-only?"
        with self.run.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"worker ended with exit code {code}" + (f": {said[-1]}" if said else " and said nothing")
