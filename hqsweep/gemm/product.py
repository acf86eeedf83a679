"""Products of bfloat16 matrices, one GEMM each, on CUDA: hqsweep::product and add_product_, and the fastest algorithm.

cuBLASLt multiplies its float32 accumulator by alpha before it rounds to the output's dtype. It reads alpha from device
memory (CUBLASLT_POINTER_MODE_DEVICE), where a small kernel computes it from the operands' factors. So no float32
product is written and read again, and nothing waits for the factors. With beta it adds to an existing matrix. The
library is the one that torch has loaded. Without it, torch.mm and scale_product compute the same.

fastest_product() chooses among cuBLASLt's algorithms. The library ranks them by an estimate, and torch takes the first.
Others were up to a fifth faster on an H100 (benchmarks/NOTES.md). So the first large product of each shape tries
several on random data. An algorithm qualifies only if every bit equals torch's product. Results therefore depend
neither on the timings nor on the machine.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hqsweep.memo import constant_result, memo
from hqsweep.ops.library import described, empty, extension, has_kernels, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

Lie = tuple[int, int, bool]
"""A matrix's memory layout: elements between lines, elements between matrices, and whether lines are columns."""


@constant_result
def has_products() -> bool:
    """Return whether this process has a cuBLASLt that the extension supports: version 12 or 13."""
    return has_kernels("cuda") and extension().product_library_version() > 0


def lie_of(x: Tensor) -> Lie | None:
    """Return the memory layout of x [m, k] or [e, m, k]. None if both rows and columns have gaps."""
    rows, cols = x.shape[-2:]
    down, across = x.stride()[-2:]
    step = x.stride(0) if x.dim() == 3 else 0
    if across == 1 or cols == 1:
        stride, turned = (down if rows > 1 else cols), False
    elif down == 1 or rows == 1:
        stride, turned = (across if cols > 1 else rows), True
    else:
        return None
    return (stride, step, turned) if stride >= (rows if turned else cols) else None


def takes(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether product() computes a @ b.mT to this dtype, bfloat16 or float32.

    a, b: bfloat16 on CUDA, [m, k] and [n, k], or [e, m, k] and [e, n, k]. None is empty, and rows or columns have no
    gaps.
    """
    if not (a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and dtype in (torch.bfloat16, torch.float32)):
        return False
    fits = a.dim() == b.dim() and a.dim() in (2, 3) and a.shape[-1] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]
    filled = fits and a.numel() > 0 and b.numel() > 0
    return filled and has_products() and lie_of(a) is not None and lie_of(b) is not None


def alignment(x: Tensor) -> int:
    """Return the largest power of two up to 256 that divides the address of x."""
    address = x.data_ptr()
    return min(address & -address, 256)


def _check(a: Tensor, b: Tensor, dtype: torch.dtype, factors: tuple[Tensor | None, Tensor | None]) -> None:
    if not takes(a, b, dtype) or b.device != a.device:
        allowed = "bfloat16 [m, k] and [n, k] (or e of each) on one GPU, rows or columns without gaps"
        raise ValueError(f"a is {described(a)} and b is {described(b)} for {dtype}; they take {allowed}")
    for factor in factors:
        if factor is not None and (
            factor.numel() != 1 or factor.dtype != torch.float32 or factor.device != a.device or not factor.data_ptr()
        ):
            raise ValueError(f"factor is {described(factor)}; it takes one float32 on {a.device}")


class Planned(NamedTuple):
    """A plan of the extension, and its scratch memory."""

    plan: Any
    scratch: int

    def run(self, out: Tensor, a: Tensor, b: Tensor, factors: Sequence[int] = (0, 0), constant: float = 1.0) -> None:
        """Write the product to out. factors: the addresses of the factors of a and b."""
        scratch = empty(a, (self.scratch // 4,), (1,), torch.float32)
        addresses = a.data_ptr(), b.data_ptr(), out.data_ptr(), *factors
        self.plan.run(*addresses, constant, scratch.data_ptr(), *where(a))


@memo
def _plan(device: int, sizes: tuple, a: tuple, b: tuple, out: tuple) -> Planned | None:
    """Return the plan, made once for equal arguments. None if the library has no algorithm."""
    dtype, alignment, accumulate, scaled = out
    plan = extension().ProductPlan(sizes, a, b, DTYPES[dtype], alignment, accumulate, scaled, device)
    return Planned(plan, plan.scratch) if plan.found else None


def _multiply(out: Tensor, a: Tensor, b: Tensor, factors: tuple, constant: float, accumulate: bool) -> bool:
    """Write the product to contiguous out, and return whether cuBLASLt could.

    A single row or column is refused: cuBLASLt's kernels for it multiply by alpha before they add, which rounds
    otherwise.
    """
    (m, k), n, count = a.shape[-2:], b.shape[-2], a.shape[0] if a.dim() == 3 else 1
    if m == 1 or n == 1:
        return False
    addresses = [0 if factor is None else factor.data_ptr() for factor in factors]
    planned = _plan(
        a.get_device(), (count, m, n, k), (*lie_of(a), alignment(a)), (*lie_of(b), alignment(b)),
        (out.dtype, alignment(out), accumulate, any(addresses)),
    )  # fmt: skip
    if planned is None:
        return False
    planned.run(out, a, b, addresses, constant)
    return True


def _by_torch(a: Tensor, b: Tensor, factors: tuple, constant: float, dtype: torch.dtype) -> Tensor:
    """Return product() computed in two passes: the float32 product, then the scaling."""
    product = (torch.mm if a.dim() == 2 else torch.bmm)(a, b.mT, out_dtype=torch.float32)
    alpha = torch.full((1, 1), 1.0, device=a.device)
    for factor in (*factors, constant):
        alpha = alpha if factor is None else alpha * (factor.view(1, 1) if isinstance(factor, Tensor) else factor)
    return scale_product(product.view(-1, product.shape[-1]), alpha, dtype).view(product.shape)


def _product_fake(a, b, factor_a, factor_b, constant, dtype):
    return a.new_empty(*a.shape[:-1], b.shape[-2], dtype=dtype)


@operator(
    "product(Tensor a, Tensor b, Tensor? factor_a, Tensor? factor_b, float constant, ScalarType dtype) -> Tensor",
    fake=_product_fake,
    devices=("CUDA",),
)
def product(
    a: Tensor, b: Tensor, factor_a: Tensor | None, factor_b: Tensor | None, constant: float, dtype: torch.dtype
) -> Tensor:
    """Return fl(alpha * sum_k a[i, k] * b[j, k]), with alpha = fl(fl(factor_a * factor_b) * fl(constant)).

    Sum and product are float32 and rounded to dtype, bfloat16 or float32. a [m, k], b [n, k] -> [m, n], or e of each.
    Factors: one float32 each, None for 1. The library decides the order of the sum. ValueError for operands that
    `takes` refuses, and for other factors.
    """
    _check(a, b, dtype, (factor_a, factor_b))
    (m, n), head = (a.shape[-2], b.shape[-2]), a.shape[:-2]
    out = empty(a, (*head, m, n), (*(m * n for _ in head), n, 1), dtype)
    if _multiply(out, a, b, (factor_a, factor_b), constant, False):
        return out
    return _by_torch(a, b, (factor_a, factor_b), constant, dtype)


def product_into(
    out: Tensor, a: Tensor, b: Tensor, factor_a: Tensor | None, factor_b: Tensor | None, constant: float
) -> bool:
    """Write product() to out, contiguous [m, n], whose dtype it rounds to. Return whether it could.

    False, and nothing is written, if cuBLASLt has no kernel for it.
    """
    _check(a, b, out.dtype, (factor_a, factor_b))
    return _multiply(out, a, b, (factor_a, factor_b), constant, False)


@operator(
    "add_product_(Tensor(a!) out, Tensor a, Tensor b, Tensor? factor_a, Tensor? factor_b, float constant) -> ()",
    fake=lambda *_: None,
    devices=("CUDA",),
)
def add_product(
    out: Tensor, a: Tensor, b: Tensor, factor_a: Tensor | None, factor_b: Tensor | None, constant: float
) -> None:
    """Add alpha * a @ b.mT to out in place, in float32, without a separate product in memory.

    out: float32, contiguous, with the product's shape. ValueError for another, and as product() raises it.
    """
    _check(a, b, torch.float32, (factor_a, factor_b))
    shape = (*a.shape[:-1], b.shape[-2])
    if out.dtype != torch.float32 or out.shape != shape or not out.is_contiguous() or out.device != a.device:
        raise ValueError(f"out is {described(out)}; it takes float32 {shape}, contiguous, on {a.device}")
    if not _multiply(out, a, b, (factor_a, factor_b), constant, True):
        out.add_(_by_torch(a, b, (factor_a, factor_b), constant, torch.float32))


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
    except RuntimeError:  # the library offers it, but cannot run it
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


@operator(
    "scale_product(Tensor product, Tensor factor, ScalarType dtype, float before=1.0) -> Tensor",
    fake=lambda product, factor, dtype, before=1.0: torch.empty_like(product, dtype=dtype),
    devices=("CUDA",),
)
def scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype, before: float = 1.0) -> Tensor:
    """Return fl(fl(product * before) * factor) in float32, rounded to dtype.

    product: float32 or bfloat16 [m, n], contiguous. factor: float32 [1, 1], [m, 1] or [1, n].
    """
    if product.dtype not in (torch.float32, torch.bfloat16) or product.dim() != 2 or not product.is_contiguous():
        raise ValueError(f"product is {described(product)}; it takes float32 or bfloat16 with two axes, contiguous")
    rows, cols = product.shape
    fits = factor.dim() == 2 and factor.shape[0] in (1, rows) and factor.shape[1] in (1, cols)
    if not fits or factor.dtype != torch.float32 or factor.device != product.device:
        takes = f"it takes float32 [1, 1], [m, 1] or [1, n] on {product.device}"
        raise ValueError(f"factor is {described(factor)} for a product {tuple(product.shape)}; {takes}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; products are rounded to float32, bfloat16 or float16")
    out = torch.empty_like(product, dtype=dtype)
    steps = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    call = (product.data_ptr(), DTYPES[product.dtype], before, factor.data_ptr(), rows, cols, *steps)
    extension().scale_product_cuda(*call, out.data_ptr(), DTYPES[dtype], *where(product))
    return out
