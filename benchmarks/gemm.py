"""Which low-precision GEMMs torch runs on the GPU at hand, how fast and how accurately: the tables that plans rest on.

    python -m benchmarks.gemm [--only scaled shapes grouped linear] [--out FILE]

scaled   torch._scaled_mm for every pair of FP8 dtypes and of scale layouts, with and without fast accumulation.
shapes   the same at shapes on both sides of each alignment rule, with the error against float64.
grouped  torch._grouped_mm in bfloat16 and torch._scaled_grouped_mm: fprop, dgrad, wgrad of 8 experts.
linear   the three GEMMs of one large linear from exact operands, by output type and with an epilogue factor.

A pair that torch refuses is a row with the text of its error: that is a result, so the exit code stays 0.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.timing import Call, Cuda
from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t

SECTIONS = ("scaled", "shapes", "grouped", "linear")
COLUMNS = (
    "section", "case", "m", "n", "k", "a", "b", "scale_a", "scale_b", "out", "fast", "us", "tflops", "error_vs_fp64",
)  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS = ("tensor", "row", "1x128", "128x128")
LARGE = (8192, 14336, 4096)
EDGES = (
    (256, 256, 512), (1, 256, 512), (17, 256, 512), (255, 256, 512), (256, 8, 512), (256, 16, 512), (256, 24, 512),
    (256, 248, 512), (256, 255, 512), (256, 256, 8), (256, 256, 16), (256, 256, 24), (256, 256, 128), (256, 256, 144),
    (256, 256, 500), (256, 272, 528), (0, 256, 512),
)  # fmt: skip
EXPERTS, TOKENS, IN, OUT = 8, 1024, 2048, 4096


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_")


# ---- torch._scaled_mm ---------------------------------------------------------------------------------------------


def scale_of(layout: str, height: int, width: int) -> Tensor:
    """Decode scales of an operand [height, width], laid out as torch._scaled_mm recognises it."""
    blocks = -(-width // 128)
    power = partial(torch.randint, -2, 3, device="cuda")
    if layout == "tensor":
        return torch.full((), 0.5, device="cuda")
    if layout == "row":
        return torch.exp2(power((height, 1)).float())
    if layout == "1x128":  # rows run fastest
        return torch.exp2(power((blocks, height)).float()).t()
    padded = -(-blocks // 4) * 4  # torch wants rows of tiles a multiple of 4 apart
    return torch.exp2(power((-(-height // 128), padded)).float())[:, :blocks]


def expand(scale: Tensor, layout: str, height: int, width: int) -> Tensor:
    """One scale an element, [height, width] or broadcastable to it."""
    if layout == "1x128":
        return scale.repeat_interleave(128, dim=1)[:, :width]
    if layout == "128x128":
        return scale.repeat_interleave(128, dim=0)[:height].repeat_interleave(128, dim=1)[:, :width]
    return scale


def operand(rows_: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows_, cols, device="cuda").to(dtype)


def scaled_call(
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    layouts: tuple[str, str],
    out: torch.dtype,
    fast: bool,
) -> tuple[Call, Callable[[], Tensor]]:
    """The GEMM, and its product in float64."""
    m, n, k = shape
    a, b = operand(m, k, dtypes[0]), operand(n, k, dtypes[1])
    scale_a, scale_b = scale_of(layouts[0], m, k), scale_of(layouts[1], n, k)
    transposed = scale_b if scale_b.dim() == 0 else scale_b.t()

    def exact() -> Tensor:
        left = a.double() * expand(scale_a, layouts[0], m, k).double()
        return left @ (b.double() * expand(scale_b, layouts[1], n, k).double()).t()

    run = partial(torch._scaled_mm, a, b.t(), scale_a, transposed, out_dtype=out, use_fast_accum=fast)
    return run, exact


def speed(clock: Cuda, call: Call, flops: float) -> rows.Row:
    time = clock.medians({"call": call})["call"]
    return {"us": time * 1e6, "tflops": flops / time * 1e-12}


def measure_scaled(writer: rows.Writer, clock: Cuda) -> None:
    m, n, k = LARGE
    for a, b in product((E4M3, E5M2), repeat=2):
        for layouts in product(LAYOUTS, repeat=2):
            for out, fast in product((torch.bfloat16, torch.float32), (False, True)):
                named = {
                    "section": "scaled",
                    "case": "_scaled_mm",
                    "m": m,
                    "n": n,
                    "k": k,
                    "a": short(a),
                    "b": short(b),
                }
                named |= {"scale_a": layouts[0], "scale_b": layouts[1], "out": short(out), "fast": fast}
                writer.attempt(named, partial(_scaled, clock, (a, b), layouts, out, fast))


def _scaled(clock: Cuda, dtypes: tuple, layouts: tuple[str, str], out: torch.dtype, fast: bool) -> rows.Row:
    call, _ = scaled_call(LARGE, dtypes, layouts, out, fast)
    m, n, k = LARGE
    return speed(clock, call, 2 * m * n * k)


def measure_shapes(writer: rows.Writer, _: Cuda) -> None:
    pairs = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]
    for layouts, (m, n, k), fast in product(pairs, EDGES, (False, True)):
        if fast and "128" in "".join(layouts):
            continue  # refused at every shape; the table above has it
        named = {"section": "shapes", "case": "_scaled_mm", "m": m, "n": n, "k": k, "a": short(E4M3), "b": short(E4M3)}
        named |= {"scale_a": layouts[0], "scale_b": layouts[1], "out": "float32", "fast": fast}
        writer.attempt(named, partial(_accuracy, (m, n, k), layouts, fast))


def _accuracy(shape: tuple[int, int, int], layouts: tuple[str, str], fast: bool) -> rows.Row:
    call, exact = scaled_call(shape, (E4M3, E4M3), layouts, torch.float32, fast)
    wanted = exact()
    norm = wanted.norm().item()
    return {"error_vs_fp64": (call().double() - wanted).norm().item() / norm if norm else 0.0}


# ---- grouped ------------------------------------------------------------------------------------------------------


def grouped_calls() -> dict[str, Callable[[], Call]]:
    """Builders of the three GEMMs of a grouped linear, bfloat16 and FP8 with one scale a row."""
    total = EXPERTS * TOKENS
    offsets = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * TOKENS
    x, dy = (torch.randn(total, width, device="cuda").bfloat16() for width in (IN, OUT))
    w = torch.randn(EXPERTS, OUT, IN, device="cuda").bfloat16()

    def ones(count: int) -> Tensor:
        return torch.ones(count, device="cuda")

    def bf16(a: Tensor, b: Tensor) -> Call:
        return partial(torch._grouped_mm, a, b, offs=offsets)

    def fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Call:
        return partial(
            torch._scaled_grouped_mm,
            a,
            b,
            scale_a,
            scale_b,
            offs=offsets,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def columns(t: Tensor) -> Tensor:  # FP8, the last axis but one running fastest
        return t.mT.contiguous().to(E4M3).mT

    per_expert = partial(torch.ones, device="cuda")
    calls = {
        "_grouped_mm fprop": lambda: bf16(x, w.mT),
        "_grouped_mm dgrad": lambda: bf16(dy, w),
        "_grouped_mm wgrad": lambda: bf16(dy.t(), x),
    }
    for fast in (False, True):
        suffix = " fast" if fast else ""
        calls |= {
            f"_scaled_grouped_mm fprop{suffix}": lambda fast=fast: fp8(
                x.to(E4M3), columns(w.mT), ones(total), per_expert((EXPERTS, OUT)), fast
            ),
            f"_scaled_grouped_mm dgrad{suffix}": lambda fast=fast: fp8(
                dy.to(E4M3), columns(w), ones(total), per_expert((EXPERTS, IN)), fast
            ),
            f"_scaled_grouped_mm wgrad{suffix}": lambda fast=fast: fp8(
                dy.t().contiguous().to(E4M3), columns(x), ones(OUT * EXPERTS), ones(IN * EXPERTS), fast
            ),
        }
    return calls


def measure_grouped(writer: rows.Writer, clock: Cuda) -> None:
    flops = 2 * EXPERTS * TOKENS * IN * OUT
    for name, build in grouped_calls().items():
        named = {"section": "grouped", "case": name, "m": EXPERTS * TOKENS, "n": OUT, "k": IN, "experts": EXPERTS}
        writer.attempt(named, lambda build=build: speed(clock, build(), flops))


# ---- exact operands -----------------------------------------------------------------------------------------------


def measure_linear(writer: rows.Writer, clock: Cuda) -> None:
    tokens, width, hidden = 8192, 14336, 4096
    gemms = {"fprop": (tokens, width, hidden), "dgrad": (tokens, hidden, width), "wgrad": (width, hidden, tokens)}
    for name, (m, n, k) in gemms.items():
        for out, factor in product((torch.bfloat16, torch.float32), (False, True)):
            named = {"section": "linear", "case": f"mm_t {name}" + " with factor" * factor, "m": m, "n": n, "k": k}
            writer.attempt(named | {"out": short(out)}, partial(_exact, clock, (m, n, k), out, factor))


def _exact(clock: Cuda, shape: tuple[int, int, int], out: torch.dtype, factor: bool) -> rows.Row:
    m, n, k = shape
    scale = torch.full((1, 1), 3.0, device="cuda") if factor else None
    a, b = (ExactOperand(operand(r, k, torch.bfloat16), scale, 2688.0 if factor else 1.0) for r in (m, n))
    return speed(clock, lambda: mm_t(a, b, out_dtype=out), 2 * m * n * k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    torch.manual_seed(0)
    writer, clock = rows.Writer("gemm", "cuda", args), Cuda(args.repeats)
    measures = {
        "scaled": measure_scaled, "shapes": measure_shapes, "grouped": measure_grouped, "linear": measure_linear,
    }  # fmt: skip
    for section in args.only:
        measures[section](writer, clock)
    rows.finish(writer, COLUMNS, fail=False)


if __name__ == "__main__":
    main()
