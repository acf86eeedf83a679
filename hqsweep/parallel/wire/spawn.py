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
"""The start method by which ranks are forks of a server of this process."""
PRELOADED = (
    "hqsweep._C",
    "hqsweep.jobs.convergence",
    "hqsweep.jobs.parity.ranks",
    "hqsweep.checkpoints.sharded_save",
    "hqsweep.sweep.engine.ranks",
    "hqsweep.track.machine",
    "hqsweep.track.open",
    "hqsweep.track.rows",
)
"""The modules that the server imports: the jobs with ranks, their late imports, and the imports of a worker."""


def spawn_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run function(rank, *arguments) in `world` new processes, and return the results in order of ranks.

    Each process has one CPU thread. With "nccl" each is on the GPU of its rank; ranks share GPUs where there are fewer.

    function: a function of a module, since processes find it by name. Results: values that torch.save takes. Raises
    torch.multiprocessing.ProcessRaisedException with the traceback of a rank that raised, and ProcessExitedException
    for a rank that was killed. The other ranks are ended.
    """
    [results] = stream_ranks(world, _once, function, *arguments, backend=backend, timeout_s=timeout_s)
    return results


def stream_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout_s: float = TIMEOUT_S
) -> Iterator[list[Any]]:
    """spawn_ranks of a generator function: yields a list of the ranks' first values, then of their second values, and
    so on.

    A list comes as soon as every rank has yielded, and the ranks go on meanwhile. Ranks that still run when the caller
    stops are ended.
    """
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
    """The start method of ranks with this backend."""
    if backend != "gloo":
        return "spawn"
    start_server()
    return FORKED


def start_server() -> None:
    """Start the server that forks ranks. It imports PRELOADED once, which takes each rank seconds otherwise.

    The server ends after this process and its ranks.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))  # a running server has imported them already
    forkserver.ensure_running()


def end_with_starter() -> None:
    """End this process as soon as the process that asked for it is gone.

    A server's fork needs this: the kernel ends no process for one that is not its parent.
    """
    starter = multiprocessing.parent_process()

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _started(rank: int, variables: dict[str, str], *arguments: Any) -> None:
    """Run _rank with the environment of the process that asked for it, in place of the server's environment."""
    end_with_starter()
    gc.freeze()  # the server's modules stay, and looking through them costs time at each collection
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
    """Wait, by a file, until every rank is at its end. Messages by sockets still leave from a rank's memory until
    then."""
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
    """torch.distributed.init_process_group(backend, **options). With gloo alone, this process's threads take turns on a
    core."""
    if backend == "gloo":
        _take_turns()
    dist.init_process_group(backend, **options)


def _take_turns() -> None:
    """Have this thread, and threads that it starts, keep a core until their time slice ends (SCHED_BATCH of sched(7)).

    gloo's loop thread calls epoll_wait without a pause while another thread holds the lock of a connection with data.
    Often the loop thread itself has interrupted that thread. An all-reduce of 64 values by 2 and 4 ranks of one thread
    on 2 cores took 1.6 and 5.9 ms; under SCHED_BATCH it takes 0.3 and 1.5 ms.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux has it
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def take_gpu(local_rank: int) -> torch.device:
    """Make the GPU of a rank the current one, and return it.

    local_rank: the index of the rank on this machine, from 0; ranks go round the GPUs that this process sees.
    """
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # a DeviceMesh would otherwise make the GPU of LOCAL_RANK the current one
    return device


def stand_apart(index: int) -> None:
    """Have NCCL take this rank for one of another machine, since it refuses two ranks on a GPU of one machine.

    index: the index of this rank among the ranks of its GPU; 0 changes nothing. Such ranks exchange tensors by sockets.
    Call it before NCCL's first collective.
    """
    if index:
        machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{machine}/{index}"


def ranks_of_gpu(device: torch.device) -> list[int]:
    """The ranks on this rank's GPU, itself included. A collective of all ranks, on their CPUs."""
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    every: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return [rank for rank, gpu in enumerate(every) if gpu == own]
