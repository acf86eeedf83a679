"""One large linear, forward and backward, through hqsweep.nn.Linear, beside torch.nn.Linear in bfloat16.

    python -m benchmarks.linear [--only time kernels host] [--tokens 8192] [--in-features 4096] [--out-features 14336]
    python -m benchmarks.linear --device cpu [--steps 1000]

time     median of the whole step alternated with torch's, with a bfloat16 weight (the comparison; goal 1.08 times) and
         with a float32 master weight.
kernels  the same step under torch.profiler: device time of the GEMMs, of the quantizers, and of every other pass
         (casts, epilogues, copies), which is what a fused path should bring to nothing.
host     the time in which the host enqueues a step of 64 x 64 matrices, so small that little else is measured: until
         the last launch has returned, without waiting for the device. Median and 5th percentile of many steps, of both
         modules in turns; the ratio is that of the percentiles, which other work on the machine moves least. On a CPU,
         which has this section alone, the kernels' own time is in it (set OMP_NUM_THREADS=1 to compare versions).
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from benchmarks import rows
from benchmarks.timing import Call, Cuda, host_steps
from hqsweep.nn import Linear

SECTIONS = ("time", "kernels", "host")
CPU_SECTIONS = ("host",)
COLUMNS = (
    "section", "case", "weight", "goal", "ratio", "pass", "ms", "bf16_ms", "tflops", "gemm_us", "quantize_us",
    "other_us", "other_kernels", "host_us", "host_us_p5", "torch_host_us", "torch_host_us_p5",
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
HOST_SIZE = 64
PROFILED_STEPS = 5
GEMM_WORDS = ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")
QUANTIZE_WORDS = ("hq::",)


def step_of(module: nn.Module, x: Tensor, dy: Tensor) -> Call:
    """Forward and backward; the gradients of x and of the weight are new tensors."""

    def step() -> None:
        x.grad = module.weight.grad = None
        module(x).backward(dy)

    return step


def build(recipe: str | dict[str, str], sizes: tuple[int, int], weight: torch.dtype, device: str) -> Linear:
    recipe = f"format:{recipe}" if isinstance(recipe, str) else recipe  # "nvfp4" alone would be the packaged recipe
    return Linear(*sizes, name="layer", recipe=recipe).to(device=device, dtype=weight)


class Step:
    """The tensors of one step, and torch's own module on them."""

    def __init__(self, tokens: int, in_features: int, out_features: int, device: str) -> None:
        self.sizes, self.device = (in_features, out_features), device
        self.shape = {"tokens": tokens, "in": in_features, "out": out_features}
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

    def host(self, steps: int, name: str, weight: torch.dtype) -> rows.Row:
        times = host_steps({"host": self.hybrid(RECIPES[name], weight), "torch_host": self.plain}, steps, self.device)
        row: rows.Row = {"ratio": times["host"].low / times["torch_host"].low}
        for side, time in times.items():
            row |= {f"{side}_us": time.median * 1e6, f"{side}_us_p5": time.low * 1e6}
        return row


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


def sections(args: argparse.Namespace) -> dict[str, tuple[Step, Callable[[str, torch.dtype], rows.Row]]]:
    """Section -> the step that it measures, and how."""
    measures = {}
    if "host" in args.only:
        step = Step(HOST_SIZE, HOST_SIZE, HOST_SIZE, args.device)
        measures["host"] = step, partial(step.host, args.steps)
    if args.device == "cuda":
        step, clock = Step(args.tokens, args.in_features, args.out_features, args.device), Cuda(args.repeats)
        measures |= {"time": (step, partial(step.time, clock)), "kernels": (step, step.kernels)}
    return {section: measures[section] for section in args.only}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-features", type=int, default=4096)
    parser.add_argument("--out-features", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000, help="of the section host")
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        if args.only not in (list(CPU_SECTIONS), list(SECTIONS)):
            parser.error("--device cpu has the section host alone; give --only host, or no --only")
        args.only = list(CPU_SECTIONS)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(0)
    writer = rows.Writer("linear", args.device, args)
    for section, (step, measure) in sections(args).items():
        weights = (torch.bfloat16,) if section == "host" else (torch.bfloat16, torch.float32)
        for name, weight in product(RECIPES, weights):
            named = {"section": section, "case": name, "weight": str(weight).removeprefix("torch.")}
            writer.attempt(named | step.shape, partial(measure, name, weight))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
