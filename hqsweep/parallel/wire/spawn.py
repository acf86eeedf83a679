"""Processes that form a group of ranks: how they start, which GPU each has, and how they share CPU cores.

spawn_ranks and stream_ranks run a function in new processes of this machine, for tests and jobs that compare ranks with
one process. Trainings are started by a launcher and use the rest. Where a machine has fewer GPUs than ranks, ranks
share them; they compute and exchange the same bytes, which is enough to try a mesh out.
"""

import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others before it fails."""
POLL_S = 0.05
FORKED = "forkserver"
"""How ranks are started that are forks of a server of this process."""
PRELOADED = (
    "hqsweep._C",
    "hqsweep.jobs.convergence",
    "hqsweep.jobs.parity.ranks",
    "hqsweep.checkpoints.sharded.sharded",
    "hqsweep.sweep.engine.ranks",
    "hqsweep.track.machine",
    "hqsweep.track.open",
    "hqsweep.track.rows",
)
"""The jobs with ranks, which import what ranks do, what these import when they need it, and what a worker imports."""


def spawn_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """function(rank, *arguments) in `world` new processes, each on one CPU thread, with "nccl" each on the GPU of its
    rank, or several on one where there are fewer; returns what the ranks returned, in their order.

    function: one of a module's, as processes find it by its name; results: what torch.save takes. Raises
    torch.multiprocessing.ProcessRaisedException with the traceback of a rank that raised, and ProcessExitedException
    for one that was killed; the others are ended.
    """
    [results] = stream_ranks(world, _once, function, *arguments, backend=backend, timeout_s=timeout_s)
    return results


def stream_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout_s: float = TIMEOUT_S
) -> Iterator[list[Any]]:
    """spawn_ranks of a generator function: the first values of all ranks as soon as every rank has yielded one, then
    their second ones, and so on, while the ranks go on. Processes that are at work when the caller stops are ended."""
    with tempfile.TemporaryDirectory(prefix="hqsweep-ranks-") as folder:
        start = {"nprocs": world, "join": False, "start_method": _start_method(backend)}
        call = (dict(os.environ), world, backend, timeout_s, folder, function, arguments)
        started = mp.start_processes(_started, call, **start)
        try:
            yield from _as_they_come(started, Path(folder), world)
        finally:
            for process in started.processes:
                process.terminate()
                process.join()


def _start_method(backend: str) -> str:
    """How ranks are started."""
    if backend != "gloo":
        return "spawn"
    start_server()
    return FORKED


def start_server() -> None:
    """Start the server whose forks are the ranks that this process starts as FORKED. It imports their modules, once for
    all, which takes each of them seconds; it ends after this process and its ranks."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))  # what a server that is there already has imported, too
    forkserver.ensure_running()


def end_with_starter() -> None:
    """End this process, which may be a server's fork, as soon as the one that asked for it is gone. The kernel does not
    see to that, for it is no parent."""
    starter = multiprocessing.parent_process()

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _started(rank: int, variables: dict[str, str], *arguments: Any) -> None:
    """_rank with the environment of the process that asked for it, not the one of the server."""
    end_with_starter()
    gc.freeze()  # what the server has imported stays: to look through it at each collection is what costs
    os.environ.clear()
    os.environ.update(variables)
    _rank(rank, *arguments)


def _as_they_come(started: mp.ProcessContext, folder: Path, world: int) -> Iterator[list[Any]]:
    index, ended = 0, False
    while True:
        paths = [folder / f"{index}.{rank}.pt" for rank in range(world)]
        if all(path.exists() for path in paths):
            yield [torch.load(path, weights_only=False) for path in paths]
            for path in paths:
                path.unlink()
            index += 1
        elif ended:
            return
        else:
            ended = started.join(POLL_S)


def _wait_for_all(path: Path, rank: int, world: int) -> None:
    """Wait until every rank is at its end, by a file: what a rank has sent by sockets goes on from its memory."""
    torch.cuda.synchronize()
    store = dist.FileStore(str(path), world)
    store.set(f"end {rank}", "")
    store.wait([f"end {other}" for other in range(world)], timedelta(days=1))


def _once(rank: int, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    yield function(rank, *arguments)


def _rank(
    rank: int, world: int, backend: str, timeout_s: float, folder: str, function: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=timeout_s)}
    options["init_method"] = f"file://{folder}/store"
    if "nccl" in backend:
        device = take_gpu(rank)
        stand_apart(rank // torch.cuda.device_count())
    if backend == "nccl":
        options["device_id"] = device
    begin_process_group(backend, **options)
    try:
        for index, value in enumerate(function(rank, *arguments)):
            partial = Path(folder) / f"{index}.{rank}.partial"
            torch.save(value, partial)
            partial.rename(partial.with_suffix(".pt"))
    except BaseException:
        dist.destroy_process_group()
        raise
    if "nccl" in backend:
        _wait_for_all(Path(folder) / "ends", rank, world)
    else:  # NCCL would wait for CUDA graphs that hold its communicators
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A mesh that is still referred to keeps its groups, whose threads may free tensors while Python ends, which aborts
    # the process (github.com/pytorch/pytorch/pull/179291).
    os._exit(0)


def begin_process_group(backend: str, **options: Any) -> None:
    """torch.distributed.init_process_group(backend, **options), for ranks whose threads take turns where gloo alone
    carries what they exchange."""
    if backend == "gloo":
        _take_turns()
    dist.init_process_group(backend, **options)


def _take_turns() -> None:
    """Have the threads that this process starts from here on, and this one, keep a core until their turn ends, and not
    until another thread wakes up (SCHED_BATCH of sched(7)).

    gloo's loop thread calls epoll_wait without a pause for as long as another thread holds the lock of the connection
    that has something to read, which is often one that the loop thread has interrupted. An all-reduce of 64 values by 2
    and 4 ranks of one thread on 2 cores took 1.6 and 5.9 ms so, and takes 0.3 and 1.5.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux has it
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def take_gpu(local_rank: int) -> torch.device:
    """Make the GPU of a rank the current one, and return it. local_rank: its number among the ranks of this machine,
    from 0; the numbers go round the GPUs that this process sees."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # a DeviceMesh would otherwise make the GPU of LOCAL_RANK the current one
    return device


def stand_apart(index: int) -> None:
    """Have NCCL take the ranks of one GPU, each with an index of its own from 0, for ranks of several machines: it
    refuses two on a GPU of one machine. They exchange tensors by sockets. Call it before NCCL's first collective."""
    if index:
        machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{machine}/{index}"


def ranks_of_gpu(device: torch.device) -> list[int]:
    """The ranks on this rank's GPU, itself included. A collective of all ranks, on their CPUs."""
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    every: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return [rank for rank, gpu in enumerate(every) if gpu == own]
