"""Workers that a server of imported modules forks. A fork takes a tenth of a second of CPU to start, a new process 3 s.
All but the start is the engine's own: the channel, the log, the environment and the exit code.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO

from hqsweep.parallel.wire.spawn import FORKED, start_server
from hqsweep.sweep.engine import process


class ForkedWorker(process.WorkerProcess):
    """A WorkerProcess whose memory is not reported, for tests to which the start of a worker does not matter."""

    def __init__(self, environment: Mapping[str, str], log: BinaryIO, arguments: Sequence[str] = ()) -> None:
        start_server()
        self.channel, theirs = socket.socketpair()
        self.answers, self.peak_bytes = True, 0
        with theirs:
            started = _Started((theirs.fileno(), log.fileno(), log.fileno()), {**os.environ, **environment}, arguments)
            self._process = multiprocessing.get_context(FORKED).Process(target=started)
            self._process.start()
        self.pid = self._process.pid

    def _reaped(self, options: int = os.WNOHANG) -> int | None:
        self._process.join(0 if options else None)
        return self._process.exitcode

    def end(self) -> None:
        if self._reaped() is None:
            with suppress(ProcessLookupError):  # it has no session of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        super().end()


class _Started:
    """The function of a fork: a worker with these stdin, stdout and stderr."""

    def __init__(self, files: Sequence[int], environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.files, self.environment, self.arguments = files, environment, arguments

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"files": [DupFd(number) for number in self.files]}

    def __call__(self) -> None:
        import torch

        from hqsweep import worker

        os.setsid()
        for number, file in enumerate(self.files):
            os.dup2(file.detach(), number)
        sys.stdin = os.fdopen(0, closefd=False)
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.exit(worker.main(["--parent", str(os.getppid()), *self.arguments]))
