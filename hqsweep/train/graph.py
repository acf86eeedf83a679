"""CUDA graphs, and the memory and the stream that they share with what runs beside them.

A graph writes to the addresses that it was captured with. The memory of all graphs is one pool, from which eager work
takes its memory, too: the peak is that of the largest, not the sum. So nothing may stay alive in the pool that was not
there when a graph was captured, since a replay would write over it; `grown` says whether something did. Results of a
graph are good until another one, or eager work, runs.
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
"""The captures that failed, to which torch's allocators still refer."""
_INSIDE: list[object] = []
"""One entry for each pool that is in use now."""
_LEFT: list[torch.cuda.MemPool] = []
"""The pools whose owners are gone, which torch cannot free while another one is in use: it would end the process."""


class _Stream:
    """The stream of all pools of a device, and cuBLAS's workspace for it.

    There is one stream, because torch keeps a workspace for each that cuBLAS has worked on: a pool that held it could
    never be given up. The workspace lies in a pool of its own, which stays: graphs have its address, and torch gives
    all workspaces up when a graph of torch.compile is captured (`torch._C._cuda_clearCublasWorkspaces`)."""

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.MemPool()

    def hold_workspace(self) -> None:
        """Take the workspace, at the address that it always has, if torch has given it up; the stream is the current
        one."""
        with torch.cuda.use_mem_pool(self._pool):
            torch.cuda.current_blas_handle()


_stream_of = cache(_Stream)


class CudaGraph:
    """A function without arguments that was captured, with its results, which each replay fills."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
        self._graph, self.results = graph, results

    def replay(self) -> list[Tensor]:
        self._graph.replay()
        return self.results


class GraphPool:
    """The pool of graphs on the current device. Only work of one stream shares memory, so all of it is enqueued on one;
    autograd's threads would allocate elsewhere, so backward runs in the thread that calls it."""

    def __init__(self) -> None:
        self._shared = _stream_of(torch.cuda.current_device())
        self.stream = self._shared.stream
        self._open()

    def _open(self) -> None:
        self.pool = torch.cuda.MemPool()
        self._end = weakref.finalize(self, _leave, self.pool)
        self._live: frozenset[tuple[int, int]] = frozenset()

    def renew(self) -> None:
        """Prepare for a capture that follows graphs which were given up. Collectives keep what they have pinned for a
        graph, and torch takes no other graph into the pool of one that did; otherwise the pool goes on, with its
        memory."""
        if dist.is_available() and dist.is_initialized():
            self._end()
            self._open()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run work inside with memory from the pool."""
        with self._on_stream(), torch.cuda.use_mem_pool(self.pool), set_multithreading_enabled(False):
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream()
        self.stream.wait_stream(outer)
        _INSIDE.append(self)
        try:
            with torch.cuda.stream(self.stream):
                if len(_INSIDE) == 1:  # inside another one's memory would come from that one's pool
                    self._shared.hold_workspace()
                yield
        finally:
            _INSIDE.pop()
            if not _INSIDE:
                _LEFT.clear()
            outer.wait_stream(self.stream)

    def capture(self, function: Callable[[], list[Tensor]]) -> CudaGraph:
        """The function as a graph; nothing has run yet. Raises what capturing it raises: the first of all errors, which
        others follow from. Eager work goes on then."""
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
            while error.__context__ is not None:  # that a capture ends in an error hides the error
                error = error.__context__
            _FAILED.append(graph)
            with suppress(RuntimeError):  # torch does not end it where the capture has failed
                end_allocate_to_pool(torch.cuda.current_device(), self.pool.id)
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
                torch.zeros(1, device="cuda")  # for torch's generator a capture lasts until one succeeds
            raise error from None
        return CudaGraph(graph, results)

    def settle(self) -> None:
        """Note what is alive in the pool now: it belongs to the graphs, or was there before them."""
        self._live = self._alive()

    def grown(self) -> bool:
        """Whether something in the pool is alive that was not at the last settle()."""
        if self._alive() <= self._live:
            return False
        gc.collect()  # what only refers to itself is not alive
        return not self._alive() <= self._live

    def _alive(self) -> frozenset[tuple[int, int]]:
        """The address and the size of each block: where one was freed, a larger one may begin that ends in a graph's
        memory."""
        blocks = (block for segment in torch.cuda.memory_snapshot(self.pool.id) for block in segment["blocks"])
        return frozenset((block["address"], block["size"]) for block in blocks if block["state"] != "inactive")

    def wait(self) -> None:
        """Wait until all graphs have run, before one is given up."""
        torch.cuda.synchronize()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep objects that only refer to each other alive inside: to free a graph during a capture ends the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _leave(pool: torch.cuda.MemPool) -> None:
    """Free a pool, as soon as none is in use."""
    if _INSIDE:
        _LEFT.append(pool)
