"""A whole training step of hqsweep's Trainer (forward, loss, backward, clip, AdamW) beside the same GPT in plain torch.

    python -m benchmarks.step [--size S M L moe] [--recipes bf16 mxfp8 ...] [--modes auto] [--only floors time kinds]

floors  what each part takes at least: benchmarks/step_floors.py, at the speed of a copy and of a product in this run
time    milliseconds of a step, host included, in turns of some steps with torch.compile of the plain GPT, medians;
        share: of its tokens a second at its fastest, in this run so far (beside_ms: in these turns); memory: of its
        peak, both of the case alone, at rest and what a step takes
kinds   the device's time by what kernels do, how many run, and how many launches the host asks for

A recipe is a name of conf/recipe, with ":native" for gemm=native. A mode is a value of train.compile. Our steps are
what a run's are: with deterministic kernels only (jobs.isolation.make_deterministic); "off" beside it says what those
cost. --seconds: cases that have not begun by then become rows that say so.
"""

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.kernel_kinds import KINDS, by_kind, profile
from benchmarks.plain_gpt import PlainGPT, plain_step, with_rowwise
from benchmarks.step_cases import GOALS, MODES, RECIPES, REFERENCES, SIZES, build_recipe, training
from benchmarks.step_floors import Size, floor_rows
from benchmarks.step_rates import measured_rates, products_ms
from benchmarks.timing import Call, Cuda, cpu_medians
from hqsweep.config.train import TrainConfig
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.train.loop import Step, Trainer

SECTIONS = ("floors", "time", "kinds")
COLUMNS = (
    "section", "size", "case", "recipe", "mode", "deterministic", "ran", "ms", "share", "goal", "pass", "compiled_ms",
    "beside_ms", "ktokens_s", "tflops", "peak_gb", "memory", "reserved_gb", "first_step_s", "case_s", "launches",
    "kernels", "device_ms", *(f"{kind}_ms" for kind in KINDS), "gbytes", "tflop", "floor_ms", "fused_floor_ms",
    "copy_gbs", "matmul_tflops", "fp8_tflops",
)  # fmt: skip
WARM_STEPS = 8
"""The number of steps before a case is timed: those that compile, that allocate, or that come before a graph is
captured."""
BATCHES = 4


class Data:
    """Random tokens with the interface of a Dataset; a few batches in pinned memory, in turn."""

    def __init__(self, size: Size, device: str) -> None:
        self.vocab_size = size.vocabulary
        generator = torch.Generator().manual_seed(1)
        shape = (size.batch, size.context + 1)
        whole = [torch.randint(size.vocabulary, shape, generator=generator) for _ in range(BATCHES)]
        pairs = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in whole]
        self.pairs = [tuple(t.pin_memory() for t in pair) for pair in pairs] if device == "cuda" else pairs
        self.next = 0

    def batch(self, split: str, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        return self.pairs[step % len(self.pairs)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.next += 1
        return self.pairs[self.next % len(self.pairs)]


class Ours:
    """A step of our Trainer."""

    def __init__(self, size: Size, data: Data, recipe: str, mode: str, device: str) -> None:
        config = training(size, recipe, mode, device)
        self.trainer = Trainer(config, data, config.recipe.build(), torch.device(device))
        self.steps = self.trainer.steps()

    def __call__(self) -> Step:
        return next(self.steps)

    @property
    def ran(self) -> str:
        """How steps run after the first ones."""
        return self.trainer.runner.reason or "graph"


def plain(size: Size, data: Data, how: str, device: str) -> Call:
    """A step of the same GPT in plain torch; "rowwise": compiled, with the linears of torchao's rowwise recipe."""
    torch.manual_seed(0)
    model = PlainGPT(size.model, size.vocabulary, size.context).to(device)
    model = with_rowwise(model) if how == "rowwise" else model
    return plain_step(model, data, TrainConfig(), compiled=how != "eager")


class Prepared:
    """A case that has been built and warmed up, and what that took."""

    def __init__(self, build: Callable[[], Call], device: str, *, is_deterministic: bool) -> None:
        self.on_gpu, self.is_deterministic = device == "cuda", is_deterministic
        allocated, reserved = self._at_rest()
        start = time.perf_counter()
        with deterministic(is_deterministic):
            self.call = build()
        self.turn(1)
        self.facts: rows.Row = {"first_step_s": time.perf_counter() - start}
        self.turn(WARM_STEPS - 1)
        if self.on_gpu:
            self.facts["peak_gb"] = (torch.cuda.max_memory_allocated() - allocated) * 1e-9
            self.facts["reserved_gb"] = (torch.cuda.memory_reserved() - reserved) * 1e-9

    def _at_rest(self) -> tuple[int, int]:
        """The bytes that others have allocated and reserved."""
        gc.collect()
        if not self.on_gpu:
            return 0, 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def step(self) -> None:
        with deterministic(self.is_deterministic):
            self.call()

    def turn(self, steps: int) -> float:
        """The seconds of a step, on average over some."""
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        with deterministic(self.is_deterministic):
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                self.call()
            wait()
            return (time.perf_counter() - start) / steps


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Within this context kernels are deterministic, as in runs on a GPU, or chosen as torch does by default."""
    before, fill = torch.backends.cuda.cudnn_sdp_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    if enabled:
        make_deterministic()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def alternated(cases: Sequence[Prepared], steps: int, turns: int) -> list[float]:
    """The median seconds of a step of each case, in turns after a step that is not counted."""
    for case in cases:
        case.turn(1)
    times = [[case.turn(steps) for case in cases] for _ in range(turns)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


class Bench:
    """The cases of one size."""

    def __init__(self, name: str, args: argparse.Namespace, writer: rows.Writer, deadline: float) -> None:
        self.name, self.size, self.args, self.writer, self.deadline = name, SIZES[name], args, writer, deadline
        self.data = Data(self.size, args.device)
        self.compiled: Prepared | None = None
        self.fastest = float("inf")
        """The seconds of a step of `compiled`, the least of all its medians."""

    def run(self, section: str) -> None:
        """Run a section: plain torch first, since ours is measured beside it."""
        for how in self.args.references:
            build = partial(plain, self.size, self.data, how, self.args.device)
            self._case(section, {"case": f"torch {how}"}, build, keep=how == "compiled")
        for recipe in self.args.recipes:
            for mode, kernels in product(self.args.modes, self.args.deterministic):
                build = partial(Ours, self.size, self.data, recipe, mode, self.args.device)
                named = {"case": "hqsweep", "recipe": recipe, "mode": mode, "deterministic": kernels}
                self._case(section, named, build, is_deterministic=kernels == "on")

    def _case(
        self,
        section: str,
        named: rows.Row,
        build: Callable[[], Call],
        *,
        keep: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        """Measure one section of a case; one that fails is a row."""
        named, began = {"section": section, "size": self.name} | named, time.perf_counter()
        if began > self.deadline:
            self.writer.add(named | {"error": "not begun in --seconds"})
            return
        try:
            known = self.compiled if keep else None
            prepared = known or Prepared(build, self.args.device, is_deterministic=is_deterministic)
            if keep:
                self.compiled = prepared
            if ran := getattr(prepared.call, "ran", None):
                named["ran"] = ran
            row = named | {"time": self._time, "kinds": self._kinds}[section](prepared)
            self.writer.add(row | {"case_s": time.perf_counter() - began} | verdict(row))
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            self.writer.add(named | {"error": f"{type(error).__name__}: {text[:300]}"})

    def _time(self, case: Prepared) -> rows.Row:
        both = [case] if self.compiled in (case, None) else [case, self.compiled]
        seconds, *_ = medians = alternated(both, self.args.steps or self.size.turn, self.args.turns)
        if self.compiled is not None:
            self.fastest = min(self.fastest, medians[-1])
        row = {"ms": seconds * 1e3, "ktokens_s": self.size.tokens / seconds * 1e-3}
        row |= {"tflops": self.size.flop() / seconds * 1e-12} | case.facts
        if self.compiled is None:
            return row
        memory = self.compiled.facts.get("peak_gb")
        row |= {"memory": case.facts["peak_gb"] / memory} if memory else {}
        row |= {"beside_ms": medians[-1] * 1e3} if len(both) > 1 else {}
        return row | {"compiled_ms": self.fastest * 1e3, "share": self.fastest / seconds}

    def _kinds(self, case: Prepared) -> rows.Row:
        kernels, launches = profile(case.step)
        return {"launches": launches} | by_kind(kernels)


def verdict(row: rows.Row) -> rows.Row:
    """The goal of the row's share, and whether the share reaches it."""
    goal = GOALS.get((row["size"], row.get("recipe"))) if row.get("mode") == "auto" and "share" in row else None
    return {} if goal is None else {"goal": goal, "pass": row["share"] >= goal}


def floors(args: argparse.Namespace, writer: rows.Writer) -> None:
    on_gpu = args.device == "cuda"
    medians = Cuda(args.turns * 2).medians if on_gpu else partial(cpu_medians, seconds=0.05)
    rates = measured_rates(medians, args.device)
    writer.add({"section": "floors", "size": "", "case": "rates"} | asdict(rates))
    recipes = {name: build_recipe(name) for name in args.recipes}
    for name in args.size:
        linears_ms = products_ms(SIZES[name], medians, args.device)
        for row in floor_rows(SIZES[name], rates, linears_ms, recipes):
            writer.add({"section": "floors", "size": name} | row)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["auto"])
    parser.add_argument("--deterministic", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--references", nargs="*", choices=REFERENCES, default=list(REFERENCES[:2]))
    parser.add_argument("--turns", type=int, default=5, help="of each case beside the compiled plain GPT")
    parser.add_argument("--steps", type=int, help="in a turn (default: of the size)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so many")
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        args.only = [section for section in args.only if section != "kinds"]
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    deadline = time.perf_counter() + args.seconds
    writer = rows.Writer("step", args.device, args)
    if "floors" in args.only:
        try:
            floors(args, writer)
        except Exception as error:  # the cases come all the same
            writer.add({"section": "floors", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    benches = [Bench(name, args, writer, deadline) for name in args.size]
    for section in ("time", "kinds"):  # a profiler slows down every launch that comes after it
        for bench in benches if section in args.only else ():
            bench.run(section)
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
