"""CudaGraph: one function as a CUDA graph, and the memory and the stream that it shares with what runs beside it.

A graph writes to the addresses that it was captured with. Its memory is a pool, from which the steps that run eagerly
take theirs, too: the peak is that of the larger, not of both. It follows that nothing may stay alive in the pool that
was not there when the graph was captured, since a replay would write over it; `grown` says whether something did.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled

_FAILED: list[torch.cuda.CUDAGraph] = []
"""Captures that failed, to which torch's allocators still refer."""


class CudaGraph:
    """On the current device. Work of one stream alone shares memory, so all of it is enqueued on one; autograd's
    threads would allocate elsewhere, so backward runs in the thread that calls it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.MemPool()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._live: frozenset[int] = frozenset()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """What runs inside takes its memory from the pool."""
        with self._on_stream(), torch.cuda.use_mem_pool(self.pool), set_multithreading_enabled(False):
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream()
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def capture(self, function: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The tensors that each replay fills; nothing has run yet. Raises what capturing it raises, which comes first
        of all errors that follow from it; eager work goes on then."""
        graph = torch.cuda.CUDAGraph()
        options = {"pool": self.pool.id, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with self._on_stream(), set_multithreading_enabled(False), torch.cuda.graph(graph, **options):
                results = function()
        except Exception as error:
            while error.__context__ is not None:  # that a capture ends in an error hides the error
                error = error.__context__
            _FAILED.append(graph)
            with suppress(RuntimeError):  # torch does not end it where the capture has failed
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool.id)
            raise error from None
        self._graph = graph
        return results

    def settle(self) -> None:
        """What is alive in the pool now belongs to the graph, or was there before it."""
        self._live = self._alive()

    def grown(self) -> bool:
        """Whether something in the pool is alive that was not when the graph was captured."""
        if self._alive() <= self._live:
            return False
        gc.collect()  # what only refers to itself is not alive
        return not self._alive() <= self._live

    def _alive(self) -> frozenset[int]:
        segments = torch.cuda.memory_snapshot(self.pool.id)
        return frozenset(b["address"] for segment in segments for b in segment["blocks"] if b["state"] != "inactive")

    def replay(self) -> None:
        self._graph.replay()

    def drop(self) -> None:
        """Give up the graph, once it has run."""
        torch.cuda.synchronize()
        self._graph = None
