"""Where the device's time goes in a step: kernels by what they do, and the number of requests from the host."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from benchmarks.rows import Row
from benchmarks.timing import Call

PROFILED_STEPS = 3
LONGEST = 8
"""The most kernels that a row names."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
WORDS = {
    "optimizer": ("multi_tensor_apply", "adam", "lpnorm", "clip"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas", "grouped_mm"),
    "copies": ("memcpy", "memset", "direct_copy", "catarray", "_copy_kernel"),
}
"""Kind -> words in the lower-case name of a kernel that is not ours; the first kind with one of its words."""
QUANTIZE = ("quantize", "decode", "find_", "amax", "scale")
"""The words in the names of our kernels that quantize, fused ones included; all others of ours, except the optimizer's,
are elementwise."""
KINDS = ("gemm", "quantize", "attention", "elementwise", "optimizer", "copies")
_OURS = re.compile(r"\bhq::(?:\w+::)*(\w+)")


class Kernel(NamedTuple):
    """One kernel of a step."""

    name: str
    ms: float
    count: float
    """The number of times that it runs."""


def kind(kernel: str) -> str:
    """The kind, one of KINDS, of a kernel with this name."""
    name = kernel.replace("(anonymous namespace)::", "")
    if ours := _OURS.search(name):
        function = ours[1].lower()
        if any(word in function for word in QUANTIZE):
            return "quantize"
        return "optimizer" if any(word in function for word in WORDS["optimizer"]) else "elementwise"
    lower = name.lower()
    if lower.startswith("triton"):
        return "elementwise"
    return next((kind for kind, words in WORDS.items() if any(w in lower for w in words)), "elementwise")


def profile(step: Call) -> tuple[list[Kernel], float]:
    """The kernels of a step, longest first, and the number of launches, copies and graphs that the host asks for."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    kernels, launches = [], 0
    for event in recorded.key_averages():
        on_device = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        if on_device and event.self_device_time_total > 0:
            ms = event.self_device_time_total * 1e-3
            kernels.append(Kernel(event.key, ms / PROFILED_STEPS, event.count / PROFILED_STEPS))
        elif event.key.startswith(LAUNCHES):
            launches += event.count
    return sorted(kernels, key=lambda k: -k.ms), launches / PROFILED_STEPS


def by_kind(kernels: Iterable[Kernel]) -> Row:
    """The milliseconds of each kind and of all, the number of kernels, and the longest by name."""
    kernels = list(kernels)
    sums = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        sums[kind(kernel.name)] += kernel.ms
    row: Row = {"device_ms": sum(sums.values()), "kernels": round(sum(k.count for k in kernels))}
    row |= {f"{name}_ms": ms for name, ms in sums.items()}
    longest = (f"{k.ms:.2f} ms x{k.count:.0f} {k.name.replace('(anonymous namespace)::', '')[:90]}" for k in kernels)
    return row | {"longest": "; ".join(list(longest)[:LONGEST])}
