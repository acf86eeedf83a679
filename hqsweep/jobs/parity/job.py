"""parity: is the arithmetic what it claims to be? Every check compares bytes, and a row holds the first that differs.

kernel   both directions in one call: codes, scales, amaxes (found and given), exact operands, decoded values. Its rows
         are named cpu, for the kernel against the torch reference, and on a GPU reference and cuda, for the reference
         and the kernel there against the same bytes
statistics  what is gathered while quantizing: counts exactly, sums up to the rounding of float32
pairs    every ordered pair of formats with both columnwise sources, against the reference in two steps
vanilla  Linear with one format in both directions against its composition from the format reference
routing  Linear with a|b: forward equals the run with a alone, gradients equal the run with b alone; and three formats
and those of jobs/parity/modules.py, on whole modules, of jobs/parity/causality.py, on what a later token changes, of
jobs/parity/grouped.py, on experts, and of jobs/parity/training.py, which train a small GPT; with parity.ranks those of
jobs/parity/ranks.py, on what several processes compute together
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from hqsweep.config.format_text import SOURCES
from hqsweep.config.job import PARITY_CHECKS, ParityConfig
from hqsweep.formats import Format, RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.jobs.parity.causality import CAUSALITY_CHECKS
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row, skip
from hqsweep.jobs.parity.composed import composed
from hqsweep.jobs.parity.grouped import GROUPED_CHECKS, everywhere
from hqsweep.jobs.parity.modules import MODULE_CHECKS
from hqsweep.jobs.parity.outcomes import gathered, outcomes, same_up_to_rounding
from hqsweep.jobs.parity.ranks import NAMES as RANK_CHECKS
from hqsweep.jobs.parity.ranks import cases as rank_cases
from hqsweep.jobs.parity.ranks import ranks_check
from hqsweep.jobs.parity.training import TRAINING_CHECKS
from hqsweep.jobs.sink import Sink
from hqsweep.nn import Linear
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.ops.quantize.kernels import supports
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.train.build import pick_device

KEY = RngKey(seed=1, slot="parity", step=3)
RANKS = "ranks"
STATISTICS_SHAPE = (208, 304)
DTYPES = (torch.bfloat16, torch.float32)


def run(config: ParityConfig, sink: Sink, workspace: Path) -> None:
    """Run the named checks in order; a mismatch is a row, not an exception."""
    device = pick_device(config.parity.device)
    sink.rewind({})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sink.manifest(device=name, kernel_digest=kernel_digest(device))
    names, share, done = checks_of(config), shares(config), 0.0
    for i, name in enumerate(names):
        sink.phase(name)
        sink.progress(i, len(names), None, None, part=done)
        rows = []
        for result in {**CHECKS, RANKS: ranks_check}[name](config, device):
            rows.append(result)
            if name in COUNTED:
                sink.progress(i, len(names), None, None, part=done + share[name] * _cases(rows) / COUNTED[name](config))
        sink.rows("parity", rows)
        done += share[name]
    sink.progress(len(names), len(names), None, None)


def checks_of(config: ParityConfig) -> list[str]:
    """The named checks, and the check of ranks where their numbers are given."""
    return [*config.parity.checks, *([RANKS] if config.parity.ranks else [])]


def shares(config: ParityConfig) -> dict[str, float]:
    """Check -> its part of the whole time: the checks of kernels and of ranks take the time of their cases, and any
    other check that of about two kernel cases for each format."""
    others = 2 * len(config.parity.formats)
    work = {name: COUNTED[name](config) if name in COUNTED else others for name in checks_of(config)}
    return {name: amount / sum(work.values()) for name, amount in work.items()}


def kernel_cases(config: ParityConfig) -> int:
    """The number of matrices that the kernel check quantizes in all formats together."""
    section = config.parity
    return len(section.formats) * len(section.distributions) * len(section.shapes) * len(DTYPES)


def _cases(rows: Sequence[dict]) -> int:
    """The number of cases, as COUNTED counts them, that these rows belong to: on a GPU the kernels' cases have three
    rows each."""
    return sum(result["check"] == "cpu" or result["check"] in RANK_CHECKS for result in rows)


COUNTED = {"kernel": kernel_cases, RANKS: rank_cases}
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
    """Rows of all ordered pairs and triples of formats that can stand in both directions: y equals that of a alone, dx
    that of b, dw that of c, where c is b for a pair."""
    problem = _problem(config, device)
    names = [str(f) for f in _formats(config) if not (f.rht or f.stochastic or f.row_scaled)]
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
    columnwise = [f for f in _formats(config) if not f.row_scaled]
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
