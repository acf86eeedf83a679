"""The parity job: every check compares bytes of two implementations, and a row holds the first byte that differs.

kernel      both directions in one call: codes, scales, amaxes (found and given), exact operands, decoded values. A row
            named cpu compares the kernel with the torch reference. On a GPU, rows named reference and cuda compare the
            reference and the kernel there with the same bytes
statistics  sums and counts that are gathered while quantizing: counts exactly, sums up to the rounding of float32
pairs       every ordered pair of formats with both columnwise sources, against the reference in two steps
vanilla     Linear with one format in both directions against its composition from the format reference
routing     Linear with a|b: forward equals the run with a alone, gradients equal the run with b alone; likewise with
            three formats

More checks are in modules.py (whole modules, and the effect of a later token on earlier ones), grouped.py (experts)
and training.py (a small GPT). With parity.ranks, ranks.py compares several processes with one.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from hqsweep.config.job import PARITY_CHECKS, ParityConfig
from hqsweep.formats import ExactOperand, Format, RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.formats.spec import SOURCES
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row, skip
from hqsweep.jobs.parity.grouped import GROUPED_CHECKS, everywhere
from hqsweep.jobs.parity.modules import CAUSALITY_CHECKS, MODULE_CHECKS, composed
from hqsweep.jobs.parity.training import TRAINING_CHECKS
from hqsweep.jobs.sink import Sink
from hqsweep.nn import Linear
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.ops.quantize.dequantize import dequantize, exact_operand_of
from hqsweep.ops.quantize.kernels import supports
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import Statistics
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.train.build import pick_device

KEY = RngKey(seed=1, slot="parity", step=3)
RANKS = "ranks"
STATISTICS_SHAPE = (208, 304)
DTYPES = (torch.bfloat16, torch.float32)


def run(config: ParityConfig, sink: Sink, workspace: Path) -> None:
    """Run the named checks in order. A mismatch is a row, not an exception."""
    device = pick_device(config.parity.device)
    sink.rewind({})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sink.manifest(device=name, kernel_digest=kernel_digest(device))
    names, share, done = checks_of(config), shares(config), 0.0
    for i, name in enumerate(names):
        sink.phase(name)
        sink.progress(i, len(names), None, None, part=done)
        rows = []
        check = _ranks().ranks_check if name == RANKS else CHECKS[name]
        for result in check(config, device):
            rows.append(result)
            if name in COUNTED:
                part = done + share[name] * _cases(name, rows) / COUNTED[name](config)
                sink.progress(i, len(names), None, None, part=part)
        sink.rows("parity", rows)
        done += share[name]
    sink.progress(len(names), len(names), None, None)


def checks_of(config: ParityConfig) -> list[str]:
    """The named checks, and the check of ranks where config.parity.ranks has numbers."""
    return [*config.parity.checks, *([RANKS] if config.parity.ranks else [])]


def shares(config: ParityConfig) -> dict[str, float]:
    """Check -> its share of the whole time.

    Checks of kernels and ranks take the time of their cases; any other check takes about two kernel cases for each
    format.
    """
    others = 2 * len(config.parity.formats)
    work = {name: COUNTED[name](config) if name in COUNTED else others for name in checks_of(config)}
    return {name: amount / sum(work.values()) for name, amount in work.items()}


def kernel_cases(config: ParityConfig) -> int:
    """The number of matrices that the kernel check quantizes in all formats together."""
    section = config.parity
    return len(section.formats) * len(section.distributions) * len(section.shapes) * len(DTYPES)


def _cases(name: str, rows: Sequence[dict]) -> int:
    """The number of cases, as COUNTED counts them, that a check's rows belong to. On a GPU a kernel case has three
    rows."""
    counted = _ranks().NAMES if name == RANKS else {"cpu"}
    return sum(result["check"] in counted for result in rows)


def _ranks() -> ModuleType:
    """The module of the check of ranks. It takes as long to import as all else here, and most runs do without it."""
    from hqsweep.jobs.parity import ranks

    return ranks


COUNTED = {"kernel": kernel_cases, RANKS: lambda config: _ranks().cases(config)}
"""Check -> the number of its cases."""


def kernel_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of each format, in both directions of one call, over every distribution, shape and input dtype."""
    for format in _formats(config):
        for distribution in config.parity.distributions:
            for rows, cols in config.parity.shapes:
                for dtype in DTYPES:
                    x = draw(distribution, rows, cols, config.seed, dtype)
                    case = f"{distribution} {rows}x{cols} {str(dtype).removeprefix('torch.')}"
                    yield from _kernel_rows(format, case, x, device)


def _kernel_rows(format: Format, case: str, x: Tensor, device: torch.device) -> Rows:
    if not supports(x, format):
        yield skip("cpu", str(format), case, "no compiled kernel: the reference is what runs")
        return
    expected = outcomes(format, x, KEY, "reference")
    if device.type == "cuda":
        again = outcomes(format, x.to(device), KEY, "reference")
        yield row("reference", str(format), case, _cpu_pairs(expected, again))
    yield row("cpu", str(format), case, named_pairs(expected, outcomes(format, x, KEY, "kernel")))
    if device.type == "cuda":
        yield row("cuda", str(format), case, _cpu_pairs(expected, outcomes(format, x.to(device), KEY, "kernel")))


def statistics_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of each format over every distribution, on a matrix of six tiles of sums that ends in partial ones."""
    for format in _formats(config):
        for distribution in config.parity.distributions:
            x = draw(distribution, *STATISTICS_SHAPE, config.seed).to(device)
            if not supports(x, format):
                yield skip("statistics", str(format), distribution, "no compiled kernel: the reference is what runs")
                continue
            expected, actual = (gathered(format, x, KEY, backend) for backend in ("reference", "kernel"))
            yield row("statistics", str(format), distribution, same_up_to_rounding(expected, actual))


def vanilla_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of Linear against its composition from the format reference, for every format everywhere."""
    problem = _problem(config, device)
    for format in _formats(config):
        quantizers = everywhere(format)
        expected, actual = _linear(quantizers, *problem, apply=composed), _linear(quantizers, *problem)
        yield row("vanilla", str(format), "linear", named_pairs(expected, actual))


def routing_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of all ordered pairs and triples (a, b, c) of formats that can stand in both directions; c is b for a pair.

    y must equal y of a alone, dx must equal dx of b, and dw must equal dw of c.
    """
    problem = _problem(config, device)
    names = [str(f) for f in _formats(config) if not (f.rht or f.stochastic or f.rowwise_only)]
    alone = {name: _linear(LinearQuantizers.parse(name, "parity"), *problem) for name in names}
    for a, b, c in (*((a, b, b) for a, b in permutations(names, 2)), *permutations(_families(names), 3)):
        quantizers = {"input": f"{a}|{c}", "weight": f"{a}|{b}", "grad_output": f"{b}|{c}"}
        mixed = _linear(LinearQuantizers.parse(quantizers, "parity"), *problem)
        expected = {"y": alone[a]["y"], "dx": alone[b]["dx"], "dw": alone[c]["dw"]}
        yield row("routing", f"{a}|{b}" if b == c else f"{a}|{b}|{c}", "linear", named_pairs(expected, mixed))


def _families(names: Sequence[str]) -> list[str]:
    """The formats without options."""
    return [name for name in names if "+" not in name]


def pairs_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of every ordered pair of formats with both sources, in one call, against the reference in two steps."""
    x, _, _ = _problem(config, device)
    rowwise = [f for f in _formats(config) if not f.rht]
    columnwise = [f for f in _formats(config) if not f.rowwise_only]
    for a in rowwise:
        for b in columnwise:
            for source in SOURCES:
                quantizer = HybridQuantizer(a, b, source)
                both = quantizer.quantize(x, key=KEY)
                row_key, column_key = (RngKey(seed=1, slot=f"parity/{d}", step=3) for d in ("rowwise", "columnwise"))
                first = a.encode(x, None, row_key)
                original = a.decode(first, tuple(x.shape)).to(x.dtype) if source == "rowwise_dequantized" else x
                second = b.encode(original.t(), None, column_key)
                pairs = {f"rowwise {name}": (t, both.rowwise.buffers[name]) for name, t in first.items()}
                pairs |= {f"columnwise {name}": (t, both.columnwise.buffers[name]) for name, t in second.items()}
                subject = f"{a}|{b}" if source == "original" else f"{a}|{b}@{source}"  # also where a is b
                yield row("pairs", subject, "both directions", pairs)


def _linear(
    quantizers: LinearQuantizers, x: Tensor, w: Tensor, dy: Tensor, apply: Callable[..., Tensor] = Linear.__call__
) -> dict[str, Tensor]:
    module = Linear(w.shape[1], w.shape[0], name="parity", recipe=quantizers, dtype=x.dtype).to(x.device)
    with torch.no_grad():
        module.weight.copy_(w)
    x = x.clone().requires_grad_()
    y = apply(module, x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}


def _problem(config: ParityConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [64, 128], w [96, 128], dy [64, 96] in bfloat16."""
    shapes = ((64, 128), (96, 128), (64, 96))
    return tuple(draw("heavy", *s, config.seed + i).clamp(-1e3, 1e3).to(device) for i, s in enumerate(shapes))


def _cpu_pairs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (expected[name], actual[name].cpu()) for name in expected}


def _formats(config: ParityConfig) -> list[Format]:
    return [parse(text) for text in config.parity.formats]


CHECKS: dict[str, Check] = {
    "kernel": kernel_check,
    "statistics": statistics_check,
    "vanilla": vanilla_check,
    "routing": routing_check,
    "pairs": pairs_check,
    **CAUSALITY_CHECKS,
    **GROUPED_CHECKS,
    **MODULE_CHECKS,
    **TRAINING_CHECKS,
}
assert tuple(CHECKS) == PARITY_CHECKS, "the names of the checks stand in config/job.py, in this order"


SUMS_RTOL = 1e-5
"""The relative tolerance between the kernels' float32 sums of 128 x 128 elements and the reference's float64 sums."""
SUMS_ATOL = 1e-33
"""The absolute tolerance. Smaller squares are subnormal in float32, or zero."""


def outcomes(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """All results of quantizing: codes, scales, amaxes and exact matrices of both directions in one call, and decoded
    codes.

    Amaxes are found in one call and given in another.
    """
    codes, exact = (Target(format, output, key) for output in ("codes", "exact"))
    encoded, exact = (quantize(x, target, target, backend=backend) for target in (codes, exact))
    grids, name = (None, None), format.amax_name
    if name:
        grids = tuple({name: format.grid(matrix, key)[name] * 2} for matrix in (x, x.t()))
    with_amax = quantize(x, *(codes._replace(grid=grid) for grid in grids), backend=backend)
    results = {}
    for direction, shape in (("rowwise", tuple(x.shape)), ("columnwise", tuple(x.shape)[::-1])):
        buffers = getattr(encoded, direction)
        results |= {f"{direction} {name}": tensor for name, tensor in buffers.items()}
        results |= {f"{direction} {name}, given amax": t for name, t in getattr(with_amax, direction).items()}
        decoded = dequantize(buffers, format, shape, x.dtype, backend)
        again = exact_operand_of(buffers, format, shape, backend)
        results[f"{direction} dequantized"] = one_nan(decoded)
        results[f"{direction} exact operand"] = _exact_matrix(getattr(exact, direction), format)
        results[f"{direction} exact operand of codes"] = _exact_matrix(again, format)
    return results


def gathered(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """The sums and counts of every tile, and the sums of every row, in both directions, as float32."""
    quantized = quantize(x, Target(format, key=key), Target(format, key=key), statistics=True, backend=backend)
    rowwise, columnwise = _tensors(quantized.rowwise_statistics), _tensors(quantized.columnwise_statistics)
    named = {f"rowwise {name}": t for name, t in rowwise.items()}
    return named | {f"columnwise {name}": t for name, t in columnwise.items()}


def same_up_to_rounding(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(expected, actual) pairs for a comparison of bytes. Sums that are close enough are made equal before."""
    pairs = {}
    for name, e in expected.items():
        a = actual[name].to(e.device)
        if not name.endswith("counts"):
            a = torch.where(torch.isclose(a, e, rtol=SUMS_RTOL, atol=SUMS_ATOL, equal_nan=True), e, a)
        pairs[name] = (e, a)
    return pairs


def one_nan(x: Tensor) -> Tensor:
    """x with one bit pattern for every NaN. torch's conversion to bfloat16 gives several, by device and vector
    width."""
    return torch.where(x.isnan(), torch.nan, x)


def _exact_matrix(operand: ExactOperand, format: Format) -> Tensor:
    """The exact matrix in float32, as on the CPU, or rounded to bfloat16, as elsewhere, where the format fits it."""
    return one_nan(operand.matrix.bfloat16().float() if format.fits_bf16 else operand.matrix)


def _tensors(statistics: Statistics) -> dict[str, Tensor]:
    sums = statistics.sums.float()
    return {"sums": sums[:, :3], "amax and counts": sums[:, 3:7], "row errors": statistics.row_errors.float()}
