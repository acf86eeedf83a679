"""Speed of the compiled CPU quantizers beside the eager torch reference, as JSON lines.

    python benchmarks/quantize.py [--threads 1] [--rows 2048] [--cols 2048] [--out FILE]

Each row: format, order (row: blocks run along the contiguous axis; column: the transpose), median ns per element of
both, and their ratio. The two are run alternately and their bytes are compared before anything is timed.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from hqsweep import _C
from hqsweep.formats import RngKey, parse
from hqsweep.ops.quantize import encode

FORMATS = ("mxfp8", "nvfp4", "nvfp4+2d", "nvfp4+rht+sr", "nvfp4+4over6", "fp8_current", "fp8_block", "mxfp6_e2m3")
KEY = RngKey(seed=0, slot="benchmark", step=0)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(text: str, order: str, rows: int, cols: int, repeats: int) -> dict[str, object]:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, format = (x if order == "row" else x.t()), parse(text)
    calls = {b: lambda b=b: encode(x, format, key=KEY, backend=b) for b in ("kernel", "reference")}
    kernel, reference = (call() for call in calls.values())
    for name in reference:
        if not torch.equal(kernel[name].view(torch.uint8), reference[name].view(torch.uint8)):
            raise SystemExit(f"{text} {order}: kernel and reference differ in {name}; nothing was timed")
    times = {backend: [] for backend in calls}
    for _ in range(repeats):
        for backend, call in calls.items():
            times[backend].append(seconds(call) / x.numel() * 1e9)
    ns = {backend: statistics.median(found) for backend, found in times.items()}
    return {
        "format": text,
        "order": order,
        "kernel_ns": round(ns["kernel"], 3),
        "reference_ns": round(ns["reference"], 3),
        "speedup": round(ns["reference"] / ns["kernel"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = {"rows": args.rows, "cols": args.cols, "dtype": "bf16", "threads": args.threads}
    where |= {"machine": platform.processor() or platform.machine(), "isa": _C.build_info()["isa"]}
    for text in FORMATS:
        for order in ("row", "column"):
            row = measure(text, order, args.rows, args.cols, args.repeats) | where
            print(json.dumps(row), file=args.out, flush=True)


if __name__ == "__main__":
    main()
