"""One large linear, forward and backward, through hqsweep.nn.Linear, beside torch.nn.Linear in bfloat16.

    python -m benchmarks.linear [--only time kernels] [--tokens 8192] [--in-features 4096] [--out-features 14336]

time     median of the whole step alternated with torch's, with a bfloat16 weight (the comparison; goal 1.08 times) and
         with a float32 master weight.
kernels  the same step under torch.profiler: device time of the GEMMs, of the quantizers, and of every other pass
         (casts, epilogues, copies), which is what a fused path should bring to nothing.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import rows
from benchmarks.timing import Call, Cuda
from hqsweep.nn import Linear

SECTIONS = ("time", "kernels")
COLUMNS = (
    "section", "case", "weight", "goal", "ratio", "pass", "ms", "bf16_ms", "tflops", "gemm_us", "quantize_us",
    "other_us", "other_kernels",
)  # fmt: skip
GOAL = 1.08
RECIPES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8",
    "fp8_block": {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"},
    "fp8_current": "fp8_current",
    "nvfp4": "nvfp4",
    "nvfp4|mxfp8": "nvfp4|mxfp8",
    "nvfp4 recipe": {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"},
}
WITH_GOAL = ("mxfp8", "nvfp4", "nvfp4|mxfp8", "nvfp4 recipe")
PROFILED_STEPS = 5
GEMM_WORDS = ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")
QUANTIZE_WORDS = ("hq::",)


def step_of(module: nn.Module, x: Tensor, dy: Tensor) -> Call:
    """Forward and backward; the gradients of x and of the weight are new tensors."""

    def step() -> None:
        x.grad = module.weight.grad = None
        module(x).backward(dy)

    return step


def build(recipe: object, sizes: tuple[int, int], weight: torch.dtype, device: str) -> Linear:
    return Linear(*sizes, name="layer", recipe=recipe).to(device=device, dtype=weight)


class Step:
    """The tensors of one step, and torch's own module on them."""

    def __init__(self, tokens: int, in_features: int, out_features: int, device: str) -> None:
        self.sizes, self.device = (in_features, out_features), device
        options = {"device": device, "dtype": torch.bfloat16}
        self.x = torch.randn(tokens, in_features, **options).requires_grad_()
        self.dy = torch.randn(tokens, out_features, **options)
        self.flops = 6 * tokens * in_features * out_features
        self.plain = step_of(nn.Linear(in_features, out_features, bias=False, **options), self.x, self.dy)

    def hybrid(self, recipe: object, weight: torch.dtype) -> Call:
        return step_of(build(recipe, self.sizes, weight, self.device), self.x, self.dy)

    def time(self, clock: Cuda, name: str, weight: torch.dtype) -> rows.Row:
        time = clock.medians({"ours": self.hybrid(RECIPES[name], weight), "bf16": self.plain})
        ratio = time["ours"] / time["bf16"]
        row = {"ms": time["ours"] * 1e3, "bf16_ms": time["bf16"] * 1e3, "ratio": ratio}
        row |= {"tflops": self.flops / time["ours"] * 1e-12}
        judged = name in WITH_GOAL and weight == torch.bfloat16
        return row | ({"goal": GOAL, "pass": ratio <= GOAL} if judged else {})

    def kernels(self, name: str, weight: torch.dtype) -> rows.Row:
        return breakdown(kernel_times(self.hybrid(RECIPES[name], weight)))


def kernel_times(step: Call) -> list[tuple[str, float]]:
    """(name, microseconds a step) of every kernel, longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    times = [(e.key, e.self_device_time_total / PROFILED_STEPS) for e in profile.key_averages()]
    return sorted((t for t in times if t[1] > 0), key=lambda t: -t[1])


def breakdown(times: Iterable[tuple[str, float]]) -> rows.Row:
    """Kernel times by what they do, and the longest of the others by name."""
    sums, others = {"gemm_us": 0.0, "quantize_us": 0.0, "other_us": 0.0}, []
    for name, us in times:
        kind = _kind(name)
        sums[kind] += us
        if kind == "other_us":
            others.append(f"{name[:60]} {us:.0f}")
    return sums | {"other_kernels": "; ".join(others[:4])}


def _kind(kernel: str) -> str:
    words = {"quantize_us": QUANTIZE_WORDS, "gemm_us": GEMM_WORDS}
    return next((kind for kind, signs in words.items() if any(w in kernel.lower() for w in signs)), "other_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-features", type=int, default=4096)
    parser.add_argument("--out-features", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    torch.manual_seed(0)
    writer, clock = rows.Writer("linear", "cuda", args), Cuda(args.repeats)
    step = Step(args.tokens, args.in_features, args.out_features, "cuda")
    measures: dict[str, Callable[[str, torch.dtype], rows.Row]] = {
        "time": partial(step.time, clock),
        "kernels": step.kernels,
    }
    for section in args.only:
        for name in RECIPES:
            for weight in (torch.bfloat16, torch.float32):
                named = {"section": section, "case": name, "weight": str(weight).removeprefix("torch.")}
                shape = {"tokens": args.tokens, "in": args.in_features, "out": args.out_features}
                writer.attempt(named | shape, partial(measures[section], name, weight))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
