"""Several workers, each with one piece at a time.

concurrent.futures has no worker that ends with its parent: after SIGKILL of the parent, processes of a spawn pool stay.
It also imports the caller's main module in each of them, so that a script without a guard starts itself again, and
it does not say which signal ended a worker.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from hqsweep.errors import UserError
from hqsweep.shards.encode import Setup
from hqsweep.shards.sources import Segment

Piece = tuple[int, list[Segment]]
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def encode_all(setup: Setup, pieces: Iterator[Piece], workers: int) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """(piece, record of its shard) as they are done. A worker is started when there is a piece for it, and the next
    piece is cut while the workers are busy.

    Raises:
        UserError: what a worker refuses, or that one was killed.
        OSError: a worker cannot write.
    """
    crew: dict[Connection, subprocess.Popen] = {}
    busy: dict[Connection, Piece] = {}
    upcoming = next(pieces, None)
    try:
        while upcoming is not None or busy:
            while upcoming is not None and len(busy) < workers:
                idle = next((line for line in crew if line not in busy), None) or _hire(crew, setup)
                busy[idle] = upcoming
                _send(idle, upcoming, crew)
                upcoming = next(pieces, None)
            for line in wait(list(busy)):
                done = busy.pop(line), _answer(line, crew)
                if upcoming is not None:  # first, so that no worker waits while the caller writes what is done
                    busy[line] = upcoming
                    _send(line, upcoming, crew)
                    upcoming = next(pieces, None)
                yield done
    finally:
        for line, process in crew.items():
            line.close()
            process.kill()
            process.wait()


def _hire(crew: dict[Connection, subprocess.Popen], setup: Setup) -> Connection:
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "hqsweep.shards.worker", str(theirs.fileno())]
    crew[ours] = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | ONE_THREAD
    )
    theirs.close()
    _send(ours, setup, crew)
    return ours


def _send(line: Connection, what: Any, crew: dict[Connection, subprocess.Popen]) -> None:
    try:
        line.send(what)
    except OSError:
        raise _lost(crew[line]) from None


def _answer(line: Connection, crew: dict[Connection, subprocess.Popen]) -> dict[str, Any]:
    try:
        _, answer = line.recv()
    except (EOFError, OSError):
        raise _lost(crew[line]) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _lost(process: subprocess.Popen) -> UserError:
    code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    why = ", perhaps for want of memory: give fewer --workers" if code == -9 else ""
    return UserError(f"a worker {how}{why}; what is done is kept, and the same command goes on")
