"""The fastest cuBLASLt algorithm for a product of two bfloat16 matrices, among those with the same bits as torch's.

cuBLASLt ranks its algorithms by an estimate, and torch takes the first. Others were up to a fifth faster on an H100
(benchmarks/NOTES.md). So the first large product of each shape tries several on random data. An algorithm qualifies
only if every bit equals torch's product. Results therefore depend neither on the timings nor on the machine.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hqsweep.ops.addresses import empty
from hqsweep.ops.gemm.product import Planned, alignment, lie_of, takes
from hqsweep.ops.library import extension
from hqsweep.ops.quantize.kernels import DTYPES

Reference = Callable[..., Tensor]
"""(a [m, k], b [n, k]) -> torch's product [m, n]."""
LEAST_WORK = 1 << 32
"""Products with fewer multiplications are left to torch."""
MOST_BYTES = 640 << 20
"""Memory that a trial may use."""
WORKSPACES = (0, 32 << 20)
"""Workspace limits in bytes. Of two equally fast algorithms the one without a workspace wins: it needs no zeroed
counter.

Zeroing costs 5 us, and up to 9 us if a CUDA graph runs copies at the same time.
"""
RANKS = 6
ROUNDS, CALLS = 3, 4
ALIKE = 1.01
"""Times within this ratio count as equal."""


_CHOICES: dict[tuple, Planned | None] = {}
"""The choice for each shape; None means torch's product."""


def fastest_product(
    a: Tensor, b: Tensor, dtype: torch.dtype, reference: Reference, out: Tensor | None = None
) -> Tensor | None:
    """Return a [m, k] times the transpose of b [n, k] in dtype, with the bits of the reference; written to out if
    given.

    None, and nothing is written, if the reference shall compute it. During the capture of a CUDA graph nothing is
    tried.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] * a.shape[1] * b.shape[0] < LEAST_WORK or not takes(a, b, dtype):
        return None
    at_out = 256 if out is None else alignment(out)
    lies = (*lie_of(a), alignment(a)), (*lie_of(b), alignment(b))
    key = (a.get_device(), (1, a.shape[0], b.shape[0], a.shape[1]), *lies, dtype, at_out)
    if key not in _CHOICES:
        if torch.cuda.is_current_stream_capturing():
            return None
        _CHOICES[key] = choose(key, reference)
    choice = _CHOICES[key]
    if choice is None:
        return None
    if out is None:
        out = empty(a, (a.shape[0], b.shape[0]), (b.shape[0], 1), dtype)
    choice.run(out, a, b)
    return out


def choose(key: tuple, reference: Reference) -> Planned | None:
    """Return the choice for a product: device, sizes, memory layout and alignment of both matrices, output dtype and
    alignment.

    None for the reference, also if there is no memory for a trial.
    """
    try:
        return _try(key, reference)
    except torch.OutOfMemoryError:
        return None


def _try(key: tuple, reference: Reference) -> Planned | None:
    device, (_, m, n, k), lie_a, lie_b, dtype, _ = key
    lines = [(x[0] * (k if x[2] else rows)) for x, rows in ((lie_a, m), (lie_b, n))]
    if 2 * sum(lines) + 2 * m * n * dtype.itemsize > MOST_BYTES:
        return None
    with torch.no_grad(), torch.cuda.device(device):
        generator = torch.Generator("cuda").manual_seed(0)
        a, b = (_numbers(rows, k, lie, generator) for rows, lie in ((m, lie_a), (n, lie_b)))
        expected = reference(a, b)
        out = torch.empty_like(expected)
        same = [choice for choice in _candidates(key) if _agrees(choice, out, a, b, expected)]
        calls = [lambda: reference(a, b), *(lambda choice=choice: choice.run(out, a, b) for choice in same)]
        return preferred(same, _times(calls))


def preferred(choices: Sequence[Planned], times: Sequence[float]) -> Planned | None:
    """Return the fastest choice; among equally fast ones, the one with the least workspace. None is the reference.

    times: of the reference, then of the choices.
    """
    good = [choice for choice, time in zip([None, *choices], times, strict=True) if time <= ALIKE * min(times)]
    return min(good, key=lambda choice: (choice is None, 0 if choice is None else choice.scratch))


def _numbers(rows: int, cols: int, lie: tuple, generator: torch.Generator) -> Tensor:
    """Return a random normal matrix [rows, cols] with this memory layout."""
    stride, _, turned, _ = lie
    lines, length = (cols, rows) if turned else (rows, cols)
    x = torch.randn(lines, stride, generator=generator, device="cuda", dtype=torch.bfloat16)[:, :length]
    return x.t() if turned else x


def _candidates(key: tuple) -> list[Planned]:
    device, sizes, lie_a, lie_b, dtype, at_out = key
    found = []
    for most in WORKSPACES:
        for rank in range(RANKS):
            fields = (sizes, lie_a, lie_b, DTYPES[dtype], at_out, False, False, device)
            plan = extension().ProductPlan(*fields, most_workspace=most, rank=rank)
            if not plan.found:
                break
            found.append(Planned(plan, plan.scratch))
    return found


def _agrees(choice: Planned, out: Tensor, a: Tensor, b: Tensor, expected: Tensor) -> bool:
    try:
        choice.run(out, a, b)
    except RuntimeError:  # an algorithm that the library takes back
        return False
    return torch.equal(out, expected)


def _times(calls: list[Callable[[], object]]) -> list[float]:
    """Return each call's least time in milliseconds, over interleaved rounds."""
    times = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            times[i] = min(times[i], start.elapsed_time(end) / CALLS)
    return times
