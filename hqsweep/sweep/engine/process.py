"""Both ends of a worker process: its CPUs and GPUs, the runs that it takes from its parent, and what the parent does.

The parent writes a run's folder to the worker's stdin, a socket, as a line of JSON; the worker answers with a line when
the run is finished, and takes the next. A run that ends otherwise ends its process, so that no run starts in what a
crash left, and the end of the file ends a worker that waits. The parent starts, watches and stops each attempt at a
run, and writes its last status where the worker died first.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hqsweep.errors import EXIT_STORAGE, Damaged
from hqsweep.host import NAMED_S, Busy, Memory, stopped_among
from hqsweep.sweep.engine.task import killed_for_memory
from hqsweep.sweep.store.run_dir import CANCELLED, RunDir


def slots(workers: int | None, runs_per_gpu: int | None, gpus_per_run: int | None = None) -> list[dict[str, str]]:
    """One environment per run at a time: the GPUs it sees where there are several, {} where nothing is to be shared
    out.

    workers       runs at a time; None is runs_per_gpu times the GPUs, or 1 where either is missing
    runs_per_gpu  the most runs on one GPU; None is any number. GPUs are dealt out in turn, so that they fill evenly.
    gpus_per_run  of a run of several ranks, which no other run sees; workers None is as many as there are GPUs for.
                  None is for runs of one process.
    """
    if gpus_per_run is not None:
        return _groups(visible_gpus(), workers, gpus_per_run)
    gpus = visible_gpus() if runs_per_gpu or (workers or 1) > 1 else []
    room = len(gpus) * runs_per_gpu if runs_per_gpu and gpus else None
    count = min(filter(None, (workers, room)), default=1)
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if len(gpus) > 1 else {} for i in range(count)]


def _groups(gpus: Sequence[str], workers: int | None, size: int) -> list[dict[str, str]]:
    """Return neighbouring GPUs for each run; all GPUs if there are too few for one run."""
    room = len(gpus) // size
    if room == 0:
        return [{}] * (workers or 1)
    parts = [gpus[i * size : (i + 1) * size] for i in range(min(workers or room, room))]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def visible_gpus() -> Sequence[str]:
    """Names of the GPUs this process sees, without starting CUDA: CUDA_VISIBLE_DEVICES, else nvidia-smi."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed))]


def thread_limits(threads: int) -> dict[str, str]:
    """Return the environment that limits torch, numpy and BLAS to `threads` threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


ANSWER = b"finished\n"
PARENT_LOOK_S = 0.5
PR_SET_PDEATHSIG = 1
"""The number of PR_SET_PDEATHSIG in Linux's prctl."""
PR_SET_NAME = 15
GRACE_S = 10.0
"""The seconds from SIGTERM to SIGKILL, in which a worker writes its status."""


def line_of(run: RunDir) -> bytes:
    """The line that the parent writes for a run."""
    return json.dumps(str(run.path)).encode() + b"\n"


def serve(work: Callable[[RunDir], int | None]) -> int:
    """Do the runs that come on stdin, each with stdout and stderr in its own log. Return the exit code.

    It ends when no more runs come, or when `work` returns an exit code. None from `work` means that another run may
    follow.

    Children of a run find /dev/null on stdin. Raises OSError where a log cannot be opened.
    """
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as channel, channel.makefile("rb") as lines:
        _replace(sys.stdin.fileno(), os.open(os.devnull, os.O_RDONLY))
        for line in lines:
            run = RunDir(Path(json.loads(line)))
            write_to(run.log)
            if (exit_code := work(run)) is not None:
                return exit_code
            channel.sendall(ANSWER)
    return 0


def write_to(log: Path) -> None:
    """Append stdout and stderr to the file, also from C code and child processes."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        _replace(stream.fileno(), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))


def _replace(number: int, new: int) -> None:
    """Give the open file `new` the number of another, in this process and its children."""
    os.dup2(new, number)
    os.close(new)


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent is gone, from now on, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def name_process(name: str) -> None:
    """Give this process a name, of up to 15 bytes, that `ps` and `top` show, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def stop_with_parent(parent: int) -> None:
    """From now on, stop this process when its parent is another one than `parent`: SIGTERM, then SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


ENDED = ("finished", "failed", "interrupted")
"""The states that a worker writes when it stops."""
DELETED = "its folder was deleted while it ran; the same command starts it again"


def worker_command() -> list[str]:
    """The command of a worker, which takes its runs from stdin and ends itself when its parent is gone; -P: it imports
    nothing from the working directory."""
    return [sys.executable, "-P", "-m", "hqsweep.worker", "--parent", str(os.getpid())]


class WorkerProcess:
    """The process of `worker_command()` with `arguments`, in a session of its own, so that a terminal's Ctrl-C reaches
    the parent alone. `environment` is added to ours. Output before the first run is appended to `log`."""

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
        """Return the exit code, or minus the number of the signal that killed the process; None while it lives.

        Popen's own poll() drops the kernel's report of a child's memory.
        """
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
    """Room for one run at a time, with the threads and the GPU in `environment`.

    Its worker waits for the next run, because starting Python and torch takes longer than a short run.
    """

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    """The arguments of its workers."""
    idle: WorkerProcess | None = None

    def worker_for(self, run: RunDir, log: BinaryIO) -> WorkerProcess:
        """Hand the run to a worker, and return it: the idle one, else a new one."""
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
        """Return whether the attempt goes on.

        A worker that finishes its run stays with the slot. After a request to stop it ends, at the latest after its
        grace time.
        """
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
        """Return the final status of an attempt that ended: the worker's own, else one written here.

        If another worker has taken the run since, it is that worker's status. If nothing can be written, it is this one
        with a note of that.
        """
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
