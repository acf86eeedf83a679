"""The CPU part of benchmarks/quantize.py: both directions, beside the torch reference, torchao and a copy."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.timing import copy_call, cpu_medians
from hqsweep.formats import Format, parse
from hqsweep.ops.quantize.quantize import quantize

FORMATS = ("mxfp8", "nvfp4", "fp8_block", "nvfp4|mxfp8")
GOALS = {"times_reference": 40.0, "times_torchao": 10.0}
GOAL_FORMATS = ("mxfp8", "nvfp4")
SECONDS = 3.0
"""Time given to each variant, and a third of it with --quick."""


def torchao_calls(x: Tensor) -> dict[str, Callable[[], object]]:
    """torchao's eager quantizations of both directions by the format that they stand for; empty without torchao."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        return {}

    def mx() -> None:
        for source in (x, x.t().contiguous()):  # torchao takes contiguous tensors only, and its linear does the same
            to_mx(source, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    def nvfp4() -> None:
        for source in (x, x.t().contiguous()):
            nvfp4_quantize(source, 16, source.float().abs().amax() / 2688.0)

    return {"mxfp8": mx, "nvfp4": nvfp4}


def reference(x: Tensor, row: Format, column: Format) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return row.encode(x), column.encode(x.t())


def require_exact(x: Tensor, row: Format, column: Format) -> None:
    actual = quantize(x, row, column, backend="kernel")
    for ours, theirs in zip((actual.rowwise, actual.columnwise), reference(x, row, column), strict=True):
        for name, wanted in theirs.items():
            if not torch.equal(ours[name].reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)):
                raise AssertionError(f"buffer {name}: kernel and reference differ; nothing was timed")


def measure(text: str, x: Tensor, seconds: float) -> rows.Row:
    parts = text.split("|")
    row, column = parse(parts[0]), parse(parts[-1])
    require_exact(x[:256], row, column)
    calls = {
        "kernel": partial(quantize, x, row, column, backend="kernel"),
        "reference": partial(reference, x, row, column),
        "copy": copy_call(x),
    }
    torchao = torchao_calls(x)
    calls |= {"torchao": torchao[text]} if text in torchao else {}
    ns = {name: time / x.numel() * 1e9 for name, time in cpu_medians(calls, seconds).items()}
    ratios = {f"times_{name}": ns[name] / ns["kernel"] for name in ("reference", "torchao") if name in ns}
    result = {f"{name}_ns": value for name, value in ns.items()} | ratios
    if text not in GOAL_FORMATS:
        return result
    result |= {
        "goal": ", ".join(f"{goal:.0f} {name.replace('_', ' ')}" for name, goal in GOALS.items() if name in result)
    }
    return result | {"pass": all(result[name] >= goal for name, goal in GOALS.items() if name in result)}


def measure_cpu(writer: rows.Writer, args: argparse.Namespace) -> None:
    x = torch.randn(args.rows, args.cols, generator=torch.Generator().manual_seed(0)).bfloat16()
    for text in FORMATS:
        named = {"section": "cpu", "case": f"{text} both directions", "rows": args.rows, "cols": args.cols}
        writer.attempt(named, partial(measure, text, x, SECONDS / 3 if args.quick else SECONDS))
