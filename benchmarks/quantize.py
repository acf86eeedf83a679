"""Speed of the compiled quantizers, as JSON lines.

    python benchmarks/quantize.py [--device cpu] [--threads 1] [--rows 2048] [--cols 2048] [--out FILE]
    python benchmarks/quantize.py --device cuda [--rows 8192] [--cols 8192] [--out FILE]

Each row: format, order (row: blocks run along the contiguous axis; column: the transpose), and medians of alternate
runs. On CPU: ns per element of the kernel and of the eager torch reference, and their ratio. On CUDA, for output
`codes` (encode) and `exact` (exact_operand): time of the kernels and of a device copy of the same tensor, both between
events behind a 256 MB write that empties the L2 cache, and bandwidth with input and outputs counted once. Kernel and
reference are compared before anything is timed.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hqsweep import _C
from hqsweep.formats import Format, RngKey, parse
from hqsweep.ops.quantize import Backend, encode, exact_operand

FORMATS = (
    "mxfp8", "mxfp8+2d", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4+2d", "nvfp4+rht+sr", "nvfp4+row_scaled",
    "nvfp4+4over6", "fp8_current", "fp8_block", "fp8_block+2d",
)  # fmt: skip
KEY = RngKey(seed=0, slot="benchmark", step=0)
L2_FLUSH_BYTES = 256 * 2**20
WARM_UP = 300
Call = Callable[[], object]


def run_codes(x: Tensor, format: Format, backend: Backend) -> list[Tensor]:
    return list(encode(x, format, key=KEY, backend=backend).values())


def run_exact(x: Tensor, format: Format, backend: Backend) -> list[Tensor]:
    operand = exact_operand(x, format, key=KEY, backend=backend)
    return [operand.matrix] if operand.factor is None else [operand.matrix, operand.factor]


def seconds_cpu(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_cuda(call: Call, flush: Tensor) -> float:
    """Time on the device; the launches are enqueued while the flush still runs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def medians(calls: dict[str, Call], repeats: int, seconds: Callable[[Call], float]) -> dict[str, float]:
    """Median seconds of each call, run alternately."""
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: statistics.median(found) for name, found in times.items()}


def require_equal(text: str, order: str, kernel: list[Tensor], reference: list[Tensor]) -> None:
    pairs = zip(kernel, reference, strict=True)
    if not all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs):
        raise SystemExit(f"{text} {order}: kernel and reference differ; nothing was timed")


def measure_cpu(text: str, order: str, x: Tensor, repeats: int) -> Iterator[dict[str, object]]:
    calls = {b: lambda b=b: run_codes(x, parse(text), b) for b in ("kernel", "reference")}
    require_equal(text, order, *(call() for call in calls.values()))
    ns = {name: time / x.numel() * 1e9 for name, time in medians(calls, repeats, seconds_cpu).items()}
    yield {
        "format": text,
        "order": order,
        "kernel_ns": round(ns["kernel"], 3),
        "reference_ns": round(ns["reference"], 3),
        "speedup": round(ns["reference"] / ns["kernel"], 1),
    }


def measure_cuda(text: str, order: str, x: Tensor, repeats: int) -> Iterator[dict[str, object]]:
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=x.device)
    copy = torch.empty_like(x)
    for output, run in (("codes", run_codes), ("exact", run_exact)):
        results = run(x, parse(text), "kernel")
        require_equal(text, order, results, run(x, parse(text), "reference"))
        calls = {"kernel": lambda run=run: run(x, parse(text), "kernel"), "copy": lambda: copy.copy_(x)}
        medians(calls, WARM_UP, lambda call: seconds_cuda(call, flush))  # an idle GPU has slow clocks
        time = medians(calls, repeats, lambda call: seconds_cuda(call, flush))
        size = {"kernel": x.nbytes + sum(t.nbytes for t in results), "copy": 2 * x.nbytes}
        gbs = {name: size[name] / time[name] * 1e-9 for name in time}
        yield {
            "format": text,
            "order": order,
            "output": output,
            "kernel_us": round(time["kernel"] * 1e6, 1),
            "copy_us": round(time["copy"] * 1e6, 1),
            "kernel_gbs": round(gbs["kernel"]),
            "copy_gbs": round(gbs["copy"]),
            "percent_of_copy": round(100 * gbs["kernel"] / gbs["copy"]),
        }


def where(args: argparse.Namespace) -> dict[str, object]:
    shared = {"rows": args.rows, "cols": args.cols, "dtype": "bf16"}
    if args.device == "cuda":
        return shared | {"machine": torch.cuda.get_device_name(), "cuda": _C.build_info()["cuda_compiler"]}
    machine = platform.processor() or platform.machine()
    return shared | {"threads": args.threads, "machine": machine, "isa": _C.build_info()["isa"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, help="default: 2048 on cpu, 8192 on cuda")
    parser.add_argument("--cols", type=int, help="as --rows")
    parser.add_argument("--repeats", type=int, help="default: 5 on cpu, 30 on cuda")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.rows, args.cols = (n or (8192 if on_gpu else 2048) for n in (args.rows, args.cols))
    torch.set_num_threads(args.threads)
    measure = measure_cuda if on_gpu else measure_cpu
    for text in args.formats:
        for order in ("row", "column"):
            x = torch.randn(args.rows, args.cols, generator=torch.Generator().manual_seed(0)).bfloat16().to(args.device)
            x = x if order == "row" else x.t()
            for row in measure(text, order, x, args.repeats or (30 if on_gpu else 5)):
                print(json.dumps(row | where(args)), file=args.out, flush=True)


if __name__ == "__main__":
    main()
