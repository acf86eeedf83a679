"""Speed of the kernels for groups of experts, as JSON lines on stdout and a table on stderr.

    python -m benchmarks.grouped [--device cuda] [--only SECTION ...] [--width 2048] [--repeats 40] [--out FILE]

Floors, in bytes at the speed of a device copy of the same input (2 bytes read and 2 written an element):
  quantize  X read once, and once more where a global amax is not given; codes and scales written once. mxfp8: 2 + 1.03
            bytes an element for one direction, 2 + 2.06 for both. `bytes_floor_us` is computed before a case has run.
            The offsets are read by every thread block, from the L1 cache.
  offsets   8 or 4 bytes a split read and 8 written for each rule: nothing beside the launch, which is the floor
            (`launch_us`, that of an 8-byte memset), up to some 10,000 splits.

quantize: `us` is one call for all experts with offsets on the device; `reached` its bandwidth as a share of the copy's;
`loop_us` a call of the ungrouped kernel for each expert as Python makes them; `graph_us` the same calls in a CUDA
graph, the loop without the host. Bytes are compared with the loop's before anything is timed. The experts: 8 of 1024
rows, and 128 uneven ones, 8 of them without a row: multiples of 32, as native grouped GEMMs take them, or any numbers.

linear: a step of GroupedLinear, 8 experts of 1024 tokens, 2048 -> 4096, beside torch._grouped_mm in bfloat16 in the
same run, both enqueued before the device begins; `reached` torch's time as a share of ours, `reachable` the same of the
floor (benchmarks/grouped_linear.py), of which the products take `products_us`; `host_us` and `torch_host_us` what the
host needs to enqueue a step.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.cases import Case
from benchmarks.grouped_linear import GroupedStep, cases
from benchmarks.timing import Cuda, copy_call, cpu_medians
from hqsweep.formats import Format, RngKey, parse
from hqsweep.ops.quantize.operators import Matrices, Wanted, allocations
from hqsweep.ops.quantize.quantize import Quantized, quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits, splits_to_offsets

SECTIONS = ("quantize", "offsets", "linear")
GOAL = 0.85
CASES = (
    Case(section="quantize", rowwise="mxfp8", goal=GOAL),
    Case(section="quantize", columnwise="mxfp8", goal=GOAL),
    Case(section="quantize", rowwise="mxfp8", columnwise="mxfp8", goal=GOAL),
    Case(section="quantize", rowwise="mxfp8", columnwise="mxfp8", output="exact", goal=GOAL),
    Case(section="quantize", rowwise="fp8_block", columnwise="fp8_block"),
    Case(section="quantize", rowwise="nvfp4", columnwise="nvfp4"),
    Case(section="quantize", rowwise="nvfp4", columnwise="mxfp8", source="rowwise_dequantized"),
    Case(section="quantize", rowwise="nvfp4+row_scaled", columnwise="mxfp8", has_amax=False),
    Case(section="quantize", rowwise="fp8_current", columnwise="fp8_current", has_amax=False),
)
STEP_HEAD_START = 5e-3
"""The seconds that the device waits: longer than the host needs for a step."""
COUNTS = (8, 128, 1024, 100_000)
COLUMNS = (
    "section", "case", "weights", "splits", "experts", "rows", "cols", "goal", "reached", "pass", "reachable", "us",
    "copy_us", "bytes_floor_us", "floor_us", "gbs", "loop_us", "times_loop", "graph_us", "torch_us", "products_us",
    "launch_us", "host_us", "torch_host_us",
)  # fmt: skip


class Cpu:
    """Medians on the CPU, with the interface of timing.Cuda."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def medians(self, calls) -> dict[str, float]:
        return cpu_medians(calls, self.seconds)


def uneven(count: int, total: int, multiple: int, seed: int = 0) -> tuple[int, ...]:
    """`count` sizes that add up to `total`, with a wide distribution, the first 8 of them 0; multiples of
    `multiple`."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(count - 8, generator=generator).square() + 0.05
    ends = (weights.cumsum(0) / weights.sum() * (total // multiple)).round().long() * multiple
    return (0,) * 8 + tuple(b - a for a, b in pairwise([0, *ends.tolist()]))


def groups(width: int, scale: int) -> dict[str, tuple[int, ...]]:
    """The sizes of experts by name; scale divides them."""
    rows_of_all = 65536 * 2048 // width // scale
    return {
        "8 x 1024": (1024 // scale,) * 8,
        "128 uneven by 32": uneven(128, rows_of_all, 32),
        "128 uneven": uneven(128, rows_of_all, 1),
    }


class Group:
    """One input, its experts, and the two ways to quantize them."""

    def __init__(self, sizes: tuple[int, ...], width: int, device: str, clock: Cuda | Cpu) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(sum(sizes), width, generator=generator).bfloat16().to(device)
        self.splits, self.clock, self.sizes = Splits.of(sizes, sum(sizes)), clock, sizes
        self.splits.offsets(self.x.device)
        self.copy = copy_call(self.x)
        self.copy_gbs = 2 * self.x.nbytes / clock.medians({"copy": self.copy})["copy"] * 1e-9

    def grids(self, case: Case) -> list[dict[str, Tensor] | None]:
        """The grids rowwise and columnwise: a global amax, any number that is not 0, where the case has one."""
        one = torch.full((1, 1), 4.0, device=self.x.device)
        names = [format.amax_name if format and case.has_amax else None for format in formats(case)]
        return [{name: one} if name else None for name in names]

    def grouped(self, case: Case) -> Callable[[], Quantized]:
        """The call for all experts at once; exact columns lie by rows, as products over all experts take them."""
        members = len(self.sizes)
        keys = [RngKey(seed=0, slot=str(e), step=0) for e in range(members)]
        targets = [
            Target(format, case.output, keys, grid and [grid] * members, case.output == "exact")
            for format, grid in zip(formats(case), self.grids(case), strict=True)
        ]
        options = {"columnwise_source": case.source, "backend": "kernel"}
        return partial(quantize, self.x, *targets, splits=self.splits, **options)

    def loop(self, case: Case) -> Callable[[], list[Quantized]]:
        targets = [
            Target(format, case.output, grid=grid) for format, grid in zip(formats(case), self.grids(case), strict=True)
        ]
        options = {"columnwise_source": case.source, "backend": "kernel"}
        parts = [self.x[a:b] for a, b in self.splits.spans]
        return lambda: [quantize(part, *targets, **options) for part in parts]

    def bytes_moved(self, case: Case) -> int:
        size, matrices = case.passes * self.x.nbytes, Matrices(*self.x.shape, len(self.sizes), tuple(self.sizes))
        for columns, format in enumerate(formats(case)):
            if format:
                has_amax = case.has_amax and format.amax_name is not None
                wanted = Wanted(format.text, bool(columns), case.output == "exact", has_amax)
                outputs = allocations(matrices, wanted, self.x.is_cuda)
                size += sum(count * dtype.itemsize for (count,), dtype in outputs)
        return size

    def quantize(self, case: Case) -> rows.Row:
        size = self.bytes_moved(case)
        row = {"bytes_floor_us": size / self.copy_gbs * 1e-3}
        call, loop = self.grouped(case), self.loop(case)
        require_same(call(), loop())
        calls = {"call": call, "copy": self.copy, "loop": loop}
        if self.x.is_cuda:
            calls["graph"] = graph_of(loop)
        time = self.clock.medians(calls)
        reached = (size / time["call"]) / (2 * self.x.nbytes / time["copy"])
        row |= {"us": time["call"] * 1e6, "copy_us": time["copy"] * 1e6, "gbs": size / time["call"] * 1e-9}
        row |= {"goal": case.goal, "reached": reached, "loop_us": time["loop"] * 1e6}
        row |= {"times_loop": time["loop"] / time["call"]}
        row |= {"graph_us": time["graph"] * 1e6} if "graph" in time else {}
        return row if case.goal is None else row | {"pass": reached >= case.goal}


def formats(case: Case) -> list[Format | None]:
    """The case's formats, rowwise and columnwise."""
    return [parse(text) if text else None for text in (case.rowwise, case.columnwise)]


def require_same(group, members: list[Quantized]) -> None:
    """AssertionError unless every buffer of the group equals the members' buffers, one after the other."""
    for direction in ("rowwise", "columnwise"):
        packed, parts = getattr(group, direction), [getattr(member, direction) for member in members]
        if packed is None:
            continue
        if isinstance(packed, dict):
            pairs = [(packed[name], [part[name] for part in parts]) for name in packed]
        else:
            exact = torch.cat([member.matrix.reshape(-1) for member in packed.members])
            pairs = [(exact, [part.matrix for part in parts])]
        for ours, theirs in pairs:
            wanted = torch.cat([t.reshape(-1) for t in theirs])
            if not torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8)):
                raise AssertionError(f"{direction} differs from a call for each expert; nothing was timed")


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """`call` captured as a CUDA graph; calling the result replays it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.results = call()
    return graph.replay


def offsets(clock: Cuda | Cpu, count: int, device: str) -> rows.Row:
    """Offsets of splits beside torch's scan, multiplication and padding, and the smallest launch."""
    splits = torch.randint(0, 4096, (count,), dtype=torch.int32, device=device)
    small = torch.empty(1, dtype=torch.int64, device=device)

    def by_torch() -> Tensor:
        return torch.nn.functional.pad(torch.cumsum(splits, 0, dtype=torch.int64).mul_(2048), (1, 0))

    if not torch.equal(splits_to_offsets(splits, 2048), by_torch()):
        raise AssertionError("offsets differ from torch's; nothing was timed")
    calls = {"us": partial(splits_to_offsets, splits, 2048), "torch_us": by_torch, "launch_us": small.zero_}
    return {name: time * 1e6 for name, time in clock.medians(calls).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--scale", type=int, help="divides the numbers of rows; default 1, 32 on cpu")
    parser.add_argument("--repeats", type=int, default=40)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    writer = rows.Writer("grouped", args.device, args)
    clock = Cuda(args.repeats) if args.device == "cuda" else Cpu(0.2)
    if "quantize" in args.only:
        for name, sizes in groups(args.width, args.scale or (1 if args.device == "cuda" else 32)).items():
            group = Group(sizes, args.width, args.device, clock)
            shape = {"experts": name, "rows": sum(sizes), "cols": args.width}
            for case in (c for c in CASES if name != "128 uneven" or "nvfp4" not in (c.columnwise or "")):
                writer.attempt({"section": "quantize", "case": case.name} | shape, partial(group.quantize, case))
    for count in COUNTS if "offsets" in args.only else ():
        named = {"section": "offsets", "case": "int32, stride 2048", "experts": str(count)}
        writer.attempt(named, partial(offsets, clock, count, args.device))
    if "linear" in args.only:
        scale = 1 if args.device == "cuda" else 16
        clock = Cuda(args.repeats, head_start=STEP_HEAD_START) if args.device == "cuda" else clock
        step = GroupedStep(8, 1024 // scale, args.width // scale, 2 * args.width // scale, args.device, clock)
        shape = {"experts": f"8 x {1024 // scale}", "rows": len(step.x), "cols": args.width // scale}
        for case in cases():
            measured = (case, copy_call(step.dy), 2 * step.dy.nbytes)
            writer.attempt(case.named | shape, partial(step.measure, *measured))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
