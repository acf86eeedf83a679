"""CUDA graphs, and the memory and the stream that they share with eager work.

A graph writes to the addresses of its capture. All graphs share one pool of memory, from which eager work takes memory,
too, so the peak is the largest of them and not the sum. A replay overwrites whatever lies there. So no tensor may stay
alive in the pool that was not there when a graph was captured; `grown` tells whether one does. Results of a graph are
good until another graph, or eager work, runs.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled

from hqsweep.parallel.wire.p2p_copy import one_program
from hqsweep.torch_private import end_allocate_to_pool

_FAILED: list[torch.cuda.CUDAGraph] = []
"""Failed captures, to which torch's allocators still refer."""
_INSIDE: list[object] = []
"""One entry for each pool that is in use now."""
_LEFT: list[torch.cuda.MemPool] = []
"""Pools without an owner. To free one while another is in use would end the process."""


class _Stream:
    """The one stream of all pools of a device, and cuBLAS's workspace for it.

    torch keeps a workspace for each stream that cuBLAS has worked on, so a pool with a workspace could never be freed.
    The workspace lies in its own pool, which stays, because graphs have its address. torch drops all workspaces when
    torch.compile captures a graph (`torch._C._cuda_clearCublasWorkspaces`).
    """

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.MemPool()

    def hold_workspace(self) -> None:
        """Allocate the workspace again, at its old address, if torch has dropped it. Runs on the current stream."""
        with torch.cuda.use_mem_pool(self._pool):
            torch.cuda.current_blas_handle()


_stream_of = cache(_Stream)


class CudaGraph:
    """A captured function without arguments, with its results, which each replay fills."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
        self._graph, self.results = graph, results

    def replay(self) -> list[Tensor]:
        self._graph.replay()
        return self.results


class GraphPool:
    """The pool of graphs on the current device.

    Only work on one stream can share memory, so all work is enqueued on one. Threads of autograd would allocate
    elsewhere, so backward runs in the calling thread.
    """

    def __init__(self) -> None:
        self._shared = _stream_of(torch.cuda.current_device())
        self.stream = self._shared.stream
        self._open()

    def _open(self) -> None:
        self.pool = torch.cuda.MemPool()
        self._end = weakref.finalize(self, _leave, self.pool)
        self._live: frozenset[tuple[int, int]] = frozenset()

    def renew(self) -> None:
        """Prepare for a capture after graphs were dropped. The pool goes on with its memory, except after graphs with
        collectives.

        Collectives keep pinned memory for a graph, and torch takes no other graph into that graph's pool.
        """
        if dist.is_available() and dist.is_initialized():
            self._end()
            self._open()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """The context of eager work with memory from the pool."""
        with self._on_stream(), torch.cuda.use_mem_pool(self.pool), set_multithreading_enabled(False):
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream()
        self.stream.wait_stream(outer)
        _INSIDE.append(self)
        try:
            with torch.cuda.stream(self.stream):
                if len(_INSIDE) == 1:  # inside another pool, memory would come from that pool
                    self._shared.hold_workspace()
                yield
        finally:
            _INSIDE.pop()
            if not _INSIDE:
                _LEFT.clear()
            outer.wait_stream(self.stream)

    def capture(self, function: Callable[[], list[Tensor]]) -> CudaGraph:
        """Return the function as a graph, before its first run.

        Raises the first error of the capture, from which others follow. Eager work goes on afterwards.
        """
        graph = torch.cuda.CUDAGraph()
        options = {"pool": self.pool.id, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with (
                self._on_stream(),
                set_multithreading_enabled(False),
                _nothing_collected(),
                one_program(),
                torch.cuda.graph(graph, **options),
            ):
                results = function()
        except Exception as error:
            while error.__context__ is not None:  # the error at the end of a capture hides its cause
                error = error.__context__
            _FAILED.append(graph)
            with suppress(RuntimeError):  # torch refuses to end a failed capture
                end_allocate_to_pool(torch.cuda.current_device(), self.pool.id)
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
                torch.zeros(1, device="cuda")  # torch's generator leaves a capture only when one succeeds
            raise error from None
        return CudaGraph(graph, results)

    def settle(self) -> None:
        """Note which blocks of the pool are alive now: they belong to graphs, or are older than these."""
        self._live = self._alive()

    def grown(self) -> bool:
        """Whether a block of the pool is alive that was not alive at the last settle()."""
        if self._alive() <= self._live:
            return False
        gc.collect()  # objects that only refer to each other are not alive
        return not self._alive() <= self._live

    def _alive(self) -> frozenset[tuple[int, int]]:
        """(address, size) of each live block. A larger block may begin where one was freed, and reach into a graph's
        memory."""
        blocks = (block for segment in torch.cuda.memory_snapshot(self.pool.id) for block in segment["blocks"])
        return frozenset((block["address"], block["size"]) for block in blocks if block["state"] != "inactive")

    def wait(self) -> None:
        """Wait until all graphs have run, before one is dropped."""
        torch.cuda.synchronize()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """The context in which objects that only refer to each other stay alive. To free a graph during a capture ends the
    process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _leave(pool: torch.cuda.MemPool) -> None:
    """Free a pool as soon as no pool is in use."""
    if _INSIDE:
        _LEFT.append(pool)
