"""How fast a device copies and multiplies in this run: the rates of the floors in benchmarks/step_floors.py."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.step_floors import Rates, Size
from benchmarks.timing import Call

COPIED_BYTES = 2**30
MATMUL = 8192
SLOWER = 64
"""The factor by which a CPU copies less, so that it takes as long."""
Medians = Callable[[Mapping[str, Call]], dict[str, float]]
"""Calls by name -> the seconds of each."""


def measured_rates(medians: Medians, device: str) -> Rates:
    """The rates of a copy and of products; where the device has no FP8, its products count as bfloat16's."""
    n, nbytes = (MATMUL, COPIED_BYTES) if device == "cuda" else (MATMUL // 16, COPIED_BYTES // SLOWER)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b.T}
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        c, d = (x.to(torch.float8_e4m3fn) for x in (a, b))
        one = torch.ones((), device=device)
        calls["fp8"] = lambda: torch._scaled_mm(c, d.T, one, one, out_dtype=torch.bfloat16)
    times = medians(calls)
    tflops = {name: 2 * n**3 / seconds * 1e-12 for name, seconds in times.items()}
    copy_gbs = 2 * nbytes / times["copy"] * 1e-9
    return Rates(copy_gbs=copy_gbs, matmul_tflops=tflops["matmul"], fp8_tflops=tflops.get("fp8", tflops["matmul"]))


def products_ms(size: Size, medians: Medians, device: str) -> float:
    """The milliseconds of the products of all linears, forward and backward, each product alone; experts have equally
    many rows."""
    shapes = Counter((p.experts, p.rows // p.experts, p.k, p.n) for p in size.products())
    total = 0.0
    for (experts, tokens, k, n), count in shapes.items():
        x, w, dy = (
            torch.randn(experts, *shape, device=device).bfloat16() for shape in ((tokens, k), (n, k), (tokens, n))
        )
        if experts == 1:
            x, w, dy = x[0], w[0], dy[0]
        calls = {"fprop": partial(torch.matmul, x, w.mT), "dgrad": partial(torch.matmul, dy, w)}
        total += count * sum(medians(calls | {"wgrad": partial(torch.matmul, dy.mT, x)}).values())
    return total * 1e3
