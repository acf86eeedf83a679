"""The worker's end of the local engine: it takes the runs that its parent hands over, one after another, and notices
the parent's end.

The parent writes a run's folder to the worker's stdin, a socket, as a line of JSON; the worker answers with a line when
the run is finished, and takes the next. A run that ends otherwise ends its process, so that no run starts in what a
crash left behind, and the end of the file ends a worker that waits.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hqsweep.sweep.store.run_dir import RunDir

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
    """Do the runs that come on stdin, each with its stdout and stderr in its own log, until no more come, or `work`
    returns an exit code instead of None (which means that another run may follow). Returns the exit code.

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
    """Append stdout and stderr to the file, whoever writes there, C code and children too."""
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
    """Stop this process when process `parent` is no longer its parent, from now on: SIGTERM, then SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
