"""The fastest of cuBLASLt's algorithms for a product of two bfloat16 matrices, among those with the bits of torch's.

cuBLASLt ranks its algorithms by an estimate, and torch takes the first. Others were up to a fifth faster on an H100
(benchmarks/NOTES.md). So the first large product of each shape tries some, on numbers of its own. One is taken only if
it gives every bit that torch's product gives; hence results do not depend on what is measured, nor on the machine.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hqsweep.ops.addresses import empty
from hqsweep.ops.gemm.product import Planned, alignment, lie_of, takes
from hqsweep.ops.library import extension
from hqsweep.ops.quantize.kernels import DTYPES

Reference = Callable[..., Tensor]
"""(a [m, k], b [n, k]) -> the product [m, n] as torch computes it."""
LEAST_WORK = 1 << 32
"""The number of multiplications from which a product is worth a choice."""
MOST_BYTES = 640 << 20
"""The memory that a choice may take while it is made."""
WORKSPACES = (0, 32 << 20)
"""Bytes that algorithms may ask for. Of two that are as fast the one without a workspace is taken: it needs no counter
in memory that is set to zero before, which costs 5 us, and up to 9 where a CUDA graph has copies beside it."""
RANKS = 6
ROUNDS, CALLS = 3, 4
ALIKE = 1.01
"""Times of this ratio are as good."""


_CHOICES: dict[tuple, Planned | None] = {}
"""What was chosen for each shape; None: torch's product."""


def fastest_product(
    a: Tensor, b: Tensor, dtype: torch.dtype, reference: Reference, out: Tensor | None = None
) -> Tensor | None:
    """a [m, k] times the transpose of b [n, k] in dtype, with the bits of the reference, written to out if there is
    one; None, and nothing is written, where the reference is to compute it. While a CUDA graph is captured, nothing is
    tried."""
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
    """The choice for a product of these facts: device, sizes, how both matrices lie and are aligned, the dtype and the
    alignment of the output. None also where there is no memory to try any."""
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
    """Of the reference and the choices, whose times stand in this order, the fastest; of those that are as fast the
    choice with the least workspace. None is the reference."""
    good = [choice for choice, time in zip([None, *choices], times, strict=True) if time <= ALIKE * min(times)]
    return min(good, key=lambda choice: (choice is None, 0 if choice is None else choice.scratch))


def _numbers(rows: int, cols: int, lie: tuple, generator: torch.Generator) -> Tensor:
    """A matrix [rows, cols] of normal numbers that lies so in memory."""
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
    """The least milliseconds of each call, in turns."""
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
