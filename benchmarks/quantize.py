"""Speed of the compiled quantizers, as JSON lines on stdout and a table on stderr.

    python -m benchmarks.quantize --device cuda [--quick] [--only SECTION ...] [--rows 8192] [--cols 8192] [--out FILE]
    python -m benchmarks.quantize --device cpu [--threads 2] [--rows 4096] [--cols 4096] [--out FILE]

On CUDA a row tells the bandwidth of a call (input read once for each pass it needs, outputs written once) as a share of
a device copy of the same tensor, timed in alternation behind an L2 flush; the goal; and the two floors. On CPU: ns per
element of both directions, beside the eager torch reference, torchao where it is installed, and a copy. Kernel and
reference are compared before anything is timed; a difference is an error row, and exit code 1.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import cases, rows
from benchmarks.cases import Case
from benchmarks.quantize_cpu import measure_cpu
from benchmarks.timing import Cuda, copy_call, host_seconds
from hqsweep.formats import ExactOperand, Format, RngKey, parse
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import Quantized, quantize
from hqsweep.ops.quantize.request import Target

KEY = RngKey(seed=0, slot="benchmark", step=0)
DEFAULT_KHZ = 1.98e6
"""Boost clock of an H200, where torch does not tell the device's own."""
CHECK_SHAPES = ((512, 1024), (272, 208))
DECODED = ("mxfp8", "mxfp8+e5m2", "fp8_block", "fp8_block+2d", "fp8_current", "mxfp4", "mxfp6_e2m3", "nvfp4")
HOST = ("nvfp4|mxfp8", "mxfp8|mxfp8", "nvfp4|nvfp4", "fp8_block|mxfp8+e5m2", "fp8_current|nvfp4")
COLUMNS = (
    "section", "case", "goal", "reached", "limit", "pass", "us", "plain_us", "copy_us", "gbs", "bytes_floor_us",
    "issue_floor_us", "threads", "kernel_ns", "reference_ns", "times_reference", "torchao_ns", "times_torchao",
    "copy_ns",
)  # fmt: skip


# ---- one case: how it is called, and what it should give ----------------------------------------------------------


def global_amax(x: Tensor, format: Format) -> dict[str, Tensor] | None:
    """The amax that a format keeps for the whole matrix, under the name that encode takes it by."""
    name = None if format.delayed else format.amax_name
    return {name: format.grid(x)[name]} if name else None


def column_source(x: Tensor, case: Case) -> Tensor:
    """The matrix from which the columnwise operand is made: X.T, or the transposed decoded row operand."""
    if case.source == "original":
        return x.t()
    row = parse(case.rowwise)
    return row.decode(row.encode(x, None, KEY), tuple(x.shape)).to(x.dtype).t()


def call_of(x: Tensor, case: Case) -> Callable[[], Quantized]:
    """The call that is timed, with its amaxes ready where the case has them."""
    row, column = (parse(text) if text else None for text in (case.rowwise, case.columnwise))
    row_grid = column_grid = None
    if case.has_amax:
        row_grid = global_amax(x, row) if row else None
        column_grid = global_amax(column_source(x, case), column) if column else None
    targets = Target(row, case.output, KEY, row_grid), Target(column, case.output, KEY, column_grid)
    return partial(quantize, x, *targets, columnwise_source=case.source, backend="kernel")


def tensors_of(result: Quantized) -> list[Tensor]:
    """Every output of a call, in order."""
    tensors = []
    for operand in (result.rowwise, result.columnwise):
        if isinstance(operand, ExactOperand):
            tensors += [operand.matrix] if operand.factor is None else [operand.matrix, operand.factor]
        elif operand is not None:
            tensors += operand.values()
    return tensors


def expected(x: Tensor, case: Case) -> list[Tensor]:
    """The outputs of call_of by the torch reference."""
    tensors = []
    for text, source in ((case.rowwise, x), (case.columnwise, None)):
        if not text:
            continue
        format, source = parse(text), column_source(x, case) if source is None else source
        buffers = format.encode(source, None, KEY)
        if case.output == "exact":
            operand = format.operand(buffers, tuple(source.shape))
            tensors += [operand.matrix] if operand.factor is None else [operand.matrix, operand.factor]
        else:
            tensors += buffers.values()
    return tensors


def same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (t.reshape(-1).contiguous() for t in (a, b.to(a.dtype)))
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def require_exact(case: Case, device: torch.device) -> None:
    """Kernel against reference on small tensors, one of them of an odd shape."""
    for shape in CHECK_SHAPES:
        x = sample(*shape, device)
        actual, wanted = tensors_of(call_of(x, case)()), expected(x, case)
        if len(actual) != len(wanted) or not all(map(same_bytes, actual, wanted)):
            raise AssertionError(f"kernel and reference differ at {shape}; nothing was timed")


def sample(height: int, width: int, device: torch.device | str) -> Tensor:
    x = torch.randn(height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return x.bfloat16().to(device)


# ---- CUDA sections ------------------------------------------------------------------------------------------------


class Speed:
    """Rows of the sections on a GPU, for one tensor."""

    def __init__(self, x: Tensor, clock: Cuda, sms: int, clock_hz: float) -> None:
        self.x, self.clock, self.sms, self.clock_hz = x, clock, sms, clock_hz
        self.copy = copy_call(x)
        self.copy_gbs = 2 * x.nbytes / clock.medians({"copy": self.copy})["copy"] * 1e-9

    def floors(self, case: Case) -> rows.Row:
        """Predicted time by bytes and by instructions, before anything of the case has run."""
        size = case.passes * self.x.nbytes + sum(output_bytes(f, case, self.x.shape) for f in case.formats)
        issue = cases.issue_seconds(cases.instructions(case), self.x.numel(), self.sms, self.clock_hz)
        return {"bytes_floor_us": size / self.copy_gbs * 1e-3, "issue_floor_us": issue * 1e6}

    def bandwidth(self, call: Callable[[], object], size: int, goal: float | None) -> rows.Row:
        """Time of a call that moves `size` bytes, as a share of the copy's bandwidth in the same rounds."""
        time = self.clock.medians({"call": call, "copy": self.copy})
        reached = (size / time["call"]) / (2 * self.x.nbytes / time["copy"])
        row = {"us": time["call"] * 1e6, "copy_us": time["copy"] * 1e6, "gbs": size / time["call"] * 1e-9}
        row |= {"goal": goal, "reached": reached}
        return row if goal is None else row | {"pass": reached >= goal}

    def quantize(self, case: Case) -> rows.Row:
        require_exact(case, self.x.device)
        call = call_of(self.x, case)
        size = case.passes * self.x.nbytes + sum(t.nbytes for t in tensors_of(call()))
        return self.bandwidth(call, size, case.goal) | self.floors(case)

    def statistics(self, case: Case) -> rows.Row:
        """The row of statistics: how much gathering them adds to the pass; they stay on the device."""
        plain = call_of(self.x, case)
        time = self.clock.medians({"plain": plain, "sampled": partial(plain, statistics=True)})
        share = time["sampled"] / time["plain"] - 1
        row = {"us": time["sampled"] * 1e6, "plain_us": time["plain"] * 1e6, "reached": share}
        return row | {"limit": cases.STATISTICS_LIMIT, "pass": share <= cases.STATISTICS_LIMIT}

    def decode(self, text: str, dtype: torch.dtype) -> rows.Row:
        for shape in CHECK_SHAPES:
            self.require_exact_decode(sample(*shape, self.x.device), parse(text), dtype)
        format, shape = parse(text), tuple(self.x.shape)
        buffers = quantize(self.x, format, None).rowwise
        size = sum(t.nbytes for t in buffers.values()) + self.x.numel() * dtype.itemsize
        return self.bandwidth(lambda: dequantize(buffers, format, shape, dtype), size, None)

    @staticmethod
    def require_exact_decode(x: Tensor, format: Format, dtype: torch.dtype) -> None:
        buffers, shape = format.encode(x), tuple(x.shape)
        actual, wanted = dequantize(buffers, format, shape, dtype), format.decode(buffers, shape).to(dtype)
        if not same_bytes(actual, wanted):
            raise AssertionError(f"decoded kernel and reference differ at {shape}; nothing was timed")


def output_bytes(format: Format, case: Case, shape: torch.Size) -> int:
    height, width = shape  # of X; a transposed operand has as many entries but for partial tiles
    if case.output == "exact":
        return 2 * height * width
    return sum(b.dtype.itemsize * n * m for b in format.layout.values() for n, m in [b.shape(height, width)])


def host(text: str) -> rows.Row:
    """CPU time to enqueue one hybrid quantization of a 2048 x 2048 tensor through the Python op."""
    row, column = text.split("|")
    case = Case(section="host", rowwise=row, columnwise=column)
    us = host_seconds(call_of(sample(2048, 2048, "cuda"), case)) * 1e6
    return {"us": us, "limit": cases.HOST_LIMIT_US, "pass": us <= cases.HOST_LIMIT_US}


def measure_cuda(writer: rows.Writer, args: argparse.Namespace) -> None:
    x, clock = sample(args.rows, args.cols, "cuda"), Cuda(args.repeats or (10 if args.quick else 40))
    properties = torch.cuda.get_device_properties(x.device)
    clock_hz = getattr(properties, "clock_rate", DEFAULT_KHZ) * 1e3
    run_sections(writer, args, Speed(x, clock, properties.multi_processor_count, clock_hz))


def run_sections(writer: rows.Writer, args: argparse.Namespace, speed: Speed) -> None:
    chosen = [c for c in cases.all_cases() if c.section in args.only]
    shape = {"rows": args.rows, "cols": args.cols}
    writer.add({"section": "floors", "case": "device copy", "gbs": speed.copy_gbs, "sms": speed.sms} | shape)
    if "floors" in args.only:
        for case in cases.all_cases():
            writer.attempt({"section": "floors", "case": case.name} | shape, partial(speed.floors, case))
    for case in chosen:
        writer.attempt({"section": case.section, "case": case.name} | shape, partial(speed.quantize, case))
    for text in ("mxfp8", "fp8_block", "nvfp4") if "statistics" in args.only else ():
        case = Case(section="statistics", rowwise=text, columnwise=text)
        writer.attempt({"section": "statistics", "case": case.name} | shape, partial(speed.statistics, case))
    for text in DECODED if "decode" in args.only else ():
        for dtype in (torch.bfloat16, torch.float32):
            name = f"{text} to {str(dtype).removeprefix('torch.')}"
            writer.attempt({"section": "decode", "case": name} | shape, partial(speed.decode, text, dtype))
    for text in HOST if "host" in args.only else ():
        writer.attempt({"section": "host", "case": text, "rows": 2048, "cols": 2048}, partial(host, text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="cpu: of the kernels and of torch")
    parser.add_argument("--rows", type=int, help="default: 4096 on cpu, 8192 on cuda")
    parser.add_argument("--cols", type=int, help="as --rows")
    parser.add_argument("--repeats", type=int, help="cuda: default 40, 10 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rows.add_arguments(parser, cases.SECTIONS)
    args = parser.parse_args()
    default = 8192 if args.device == "cuda" else 4096
    args.rows, args.cols = args.rows or default, args.cols or default
    torch.set_num_threads(args.threads)
    writer = rows.Writer("quantize", args.device, args)
    (measure_cuda if args.device == "cuda" else measure_cpu)(writer, args)
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
