"""The ranks of a run over several processes: torch's elastic launcher starts them from the run's worker.

The worker holds the folder and watches the ranks. A rank that fails says why before it ends. Ranks are forks of the
worker's server, which has imported their modules once for all ranks and later runs of this worker.

The first failure ends all ranks. Its consequences (such as a connection that the dead rank has closed) are not
reported: a rank that has lost another gives way, so that the launcher sees the cause first.

Several machines meet at a store that the first one serves. Through it the first machine says what to launch, and each
says why its ranks ended.
"""

import gc
import json
import logging
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import Any

from hqsweep.errors import UserError
from hqsweep.host import Memory
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.engine.process import die_with_parent, name_process, thread_limits, write_to
from hqsweep.sweep.engine.task import RankFailed, killed_for_memory, reason_of
from hqsweep.sweep.store.run_dir import RunDir

LOOK_S = 0.5
"""Seconds between two looks at the store."""
COME_S = 300
"""Seconds in which the first machine has to serve the store."""
LAUNCHES = "hqsweep/launches"


class Meeting:
    """A client of the store, or with `serves` the store itself, at HOST:PORT."""

    def __init__(self, endpoint: str, *, serves: bool = False) -> None:
        from torch.distributed import TCPStore

        host, _, port = endpoint.rpartition(":")
        wait = timedelta(seconds=COME_S)
        self.endpoint = endpoint
        self._store = TCPStore(host, int(port), None, serves, timeout=wait, wait_for_workers=False)

    def announce(self, key: str, command: Sequence[str]) -> None:
        """Ask the other machines to launch the command under this key."""
        number = self._store.add(LAUNCHES, 1)
        self._store.set(f"{LAUNCHES}/{number}", json.dumps({"key": key, "command": list(command)}))

    def finish(self) -> None:
        """Announce to the other machines that nothing more will come."""
        self.announce("", ())

    def announced(self) -> Iterator[dict[str, Any]]:
        """Yield {"key", "command"} of each launch, as they come, until there are no more.

        Raises torch's DistNetworkError when the store is gone.
        """
        number = 1
        while True:
            while not self._store.check([f"{LAUNCHES}/{number}"]):
                time.sleep(LOOK_S)
            launch = json.loads(self._store.get(f"{LAUNCHES}/{number}"))
            if not launch["key"]:
                return
            yield launch
            number += 1

    def end(self, key: str, reason: str) -> None:
        """Say why the ranks of this machine ended, unless another one has said so; "" for ranks that finished."""
        self._store.compare_set(f"{key}/end", "", reason or "finished")

    def reason(self, key: str) -> str | None:
        """Why the ranks of a machine ended early; None while none did."""
        if not self._store.check([f"{key}/end"]):
            return None
        said = self._store.get(f"{key}/end").decode()
        return None if said == "finished" else said

    @contextmanager
    def watched(self, key: str) -> Iterator[None]:
        """SIGTERM to this process as soon as the ranks of another machine have ended early."""
        over = threading.Event()
        other = Meeting(self.endpoint)  # a client is for one thread

        def watch() -> None:
            while not over.wait(LOOK_S):
                if other.reason(key) is not None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


GIVE_WAY_S = 3.0
"""The seconds that a rank waits to be ended before it reports what another one should have."""
SHUTDOWN_S = 5
"""The seconds from SIGTERM to SIGKILL for ranks, which have nothing to write."""
WORKER = "hqsweep.worker:main"
"""The function that does a run, as ranks find it."""
HERE = "localhost:"
"""The beginning of the endpoint of a run on one machine."""
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL",
    "recvValue",
)
"""Words in error messages by which a rank learns that it has lost another rank."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run's ranks: their number, and the number of ranks on each."""

    count: int = 1
    ranks: int
    endpoint: str = "localhost:0"
    """HOST:PORT of the store at which machines meet (nodes.Meeting); a single machine takes a free port of its own."""


def launch(nodes: Nodes, key: str, run: RunDir, imports: Sequence[str], meeting: Meeting | None = None) -> None:
    """Run every rank of this machine, until all have ended.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in their environment. CPU threads are shared out. Call
    it from the main thread.

    imports: a worker's arguments with the Python factories that it may import. key: equal on all machines, and another
    for every attempt. Raises RankFailed with the rank that ended first and its reason, and torch's SignalException at
    SIGTERM or SIGINT; in either case no rank is left.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if meeting is None:
        return _launch(nodes, key, run, imports)
    try:
        with meeting.watched(key):
            _launch(nodes, key, run, imports)
        meeting.end(key, "")
    except RankFailed as failed:
        time.sleep(0 if failed.is_cause else LOOK_S * 4)  # in which the machine of the cause says it
        meeting.end(key, str(failed))
        raise RankFailed(meeting.reason(key) or str(failed)) from None
    except SignalException:
        if reason := meeting.reason(key):
            raise RankFailed(reason) from None
        meeting.end(key, "another machine was stopped")
        raise


def _launch(nodes: Nodes, key: str, run: RunDir, imports: Sequence[str]) -> None:
    from hqsweep.parallel.wire.spawn import FORKED, start_server

    threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // nodes.ranks)
    os.environ.update(thread_limits(threads))
    start_server()  # which imports beside what follows
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    kills_before = Memory().kills()
    with tempfile.TemporaryDirectory(prefix="hqsweep-ranks-") as folder:
        options = {
            "min_nodes": nodes.count, "max_nodes": nodes.count, "nproc_per_node": nodes.ranks, "run_id": key,
            "rdzv_backend": "c10d", "rdzv_endpoint": nodes.endpoint, "max_restarts": 0, "start_method": FORKED,
            "rdzv_configs": {"join_timeout": COME_S} | ({"is_host": False} if nodes.count > 1 else {}),
            "signals_to_handle": "SIGTERM,SIGINT", "logs_specs": DefaultLogsSpecs(log_dir=folder),
            "shutdown_timeout": SHUTDOWN_S, "local_addr": "localhost" if nodes.endpoint.startswith(HERE) else None,
        }  # fmt: skip
        known = {field.name for field in fields(LaunchConfig)}  # torch 2.11 lacks some of them
        config = LaunchConfig(**{name: value for name, value in options.items() if name in known})
        try:
            elastic_launch(config, _be_rank)(_Rank(run.path, tuple(imports), threads))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(_reason(rank, failure, kills_before), is_cause=not _lost(failure)) from None


@dataclass(frozen=True)
class _Rank:
    """The arguments of a rank."""

    path: Path
    imports: Sequence[str]
    threads: int


def _be_rank(told: _Rank) -> None:
    """Run as a rank, in a fork of the server. Threads and output are as in the server's first run."""
    import torch

    from hqsweep.parallel.wire.spawn import end_with_starter

    end_with_starter()
    gc.freeze()  # what the server has imported
    die_with_parent()
    name_process(f"hqsweep:{os.environ['RANK']}")
    write_to(RunDir(told.path).log)
    os.environ.update(thread_limits(told.threads))
    torch.set_num_threads(told.threads)
    if exit_code := pkgutil.resolve_name(WORKER)([str(told.path), "--rank", *told.imports]):
        _end(exit_code)
    util.Finalize(None, _end, args=(0,), exitpriority=0)  # when the launcher knows


def _end(exit_code: int) -> None:
    """End this process at once: what else its end would wait for are other ranks, or threads of a user's own code."""
    sys.stdout.flush()
    os._exit(exit_code)


def _lost(failure: Any) -> bool:
    """Whether a rank ended because it had lost another one."""
    said = failure.error_file_data.get("message")
    return isinstance(said, dict) and bool(said.get("lost"))


def _reason(rank: int, failure: Any, kills_before: int) -> str:
    """Why a rank ended, in one line."""
    said = failure.error_file_data.get("message")
    if isinstance(said, dict) and "reason" in said:
        return said["reason"]
    if failure.exitcode < 0:
        killed = failure.signal_name() == "SIGKILL"
        for_memory = killed_for_memory(Memory(), kills_before, None) if killed else None
        return f"rank {rank}: {for_memory or f'killed by {failure.signal_name()}'}"
    return f"rank {rank}: ended with exit code {failure.exitcode}; log.txt has what it said"


class Signaled(Exception):
    """SIGTERM or SIGINT came while ranks ran, and has ended them."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


@dataclass(frozen=True)
class Machines:
    """The machines of a worker's runs: their number, their meeting place, and a rank's arguments with Python
    factories."""

    nodes: int
    endpoint: str
    imports: Sequence[str]


def launch_run(run: RunDir, ranks: int, machines: Machines) -> None:
    """Do a run by its ranks. Raises RankFailed, or Signaled."""
    from torch.distributed.elastic.multiprocessing import SignalException

    nodes = Nodes(ranks=ranks // machines.nodes, count=machines.nodes, endpoint=machines.endpoint)
    run, key = RunDir(run.path.resolve()), f"{run.name}-{run.written_status()['attempt']}"
    meeting = Meeting(machines.endpoint) if machines.nodes > 1 else None
    if meeting is not None:
        meeting.announce(key, [str(nodes.ranks), str(run.path), *machines.imports])
    try:
        launch(nodes, key, run, machines.imports, meeting)
    except SignalException as signaled:
        raise Signaled(signal.Signals(signaled.sigval)) from None


def nodes_arguments(count: int, endpoint: str) -> list[str]:
    """Return a worker's arguments with the number of machines of its runs, and their meeting place."""
    return [f"--nodes={count}", f"--endpoint={endpoint}"]


def help_out(count: int, endpoint: str) -> None:
    """Be one of the further machines of a run: launch what the first one announces, until it has no more. Raises
    torch's SignalException at SIGTERM or SIGINT."""
    from torch.distributed import DistError

    meeting = Meeting(endpoint)
    with suppress(DistError):  # the first machine is gone, and so is the run
        for announced in meeting.announced():
            ranks, path, *imports = announced["command"]
            nodes = Nodes(ranks=int(ranks), count=count, endpoint=endpoint)
            with suppress(RankFailed):  # which the first machine says
                launch(nodes, announced["key"], RunDir(Path(path)), imports, meeting)


def tell(error: Exception, rank: int) -> None:
    """Leave the reason of a rank's end to the launcher (TORCHELASTIC_ERROR_FILE).

    It first gives way to the rank that caused the failure, or to rank 0, which fails by the same fault of the input.
    """
    shared = isinstance(error, UserError | Diverged)
    lost = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    if (shared and rank) or lost:
        time.sleep(GIVE_WAY_S)
    reason = reason_of(error) if shared and not rank else f"rank {rank}: {reason_of(error)}"
    message = {"message": reason, "reason": reason, "lost": lost, "extraInfo": {"timestamp": str(int(time.time()))}}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": message}))
