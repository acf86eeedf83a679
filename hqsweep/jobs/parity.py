"""parity: is the arithmetic what it claims to be? Every check compares bytes, and a row holds the first that differs.

kernel   both directions in one call: codes, scales, amaxes (found and given), exact operands, decoded values. Its rows
         are named cpu, for the kernel against the torch reference, and on a GPU reference and cuda, for the reference
         and the kernel there against the same bytes
statistics  what is gathered while quantizing: counts exactly, sums up to the rounding of float32
pairs    every ordered pair of formats with both columnwise sources, against the reference in two steps
vanilla  Linear with one format in both directions against its GEMMs composed by hand
routing  Linear with a|b: forward equals the run with a alone, gradients equal the run with b alone
repeat   the same training twice
resume   training interrupted by a checkpoint against uninterrupted training
weights  training with quantized weights and FP32 masters against training that quantizes FP32 weights at every use:
         losses, weights, moments; then the same interrupted by a checkpoint, with the codes
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hqsweep.formats import NVFP4, ExactOperand, Format, RngKey, parse
from hqsweep.gemm import mm_t
from hqsweep.jobs.compare_bytes import row, skip
from hqsweep.jobs.inputs import draw
from hqsweep.jobs.outcomes import gathered, outcomes, same_up_to_rounding
from hqsweep.jobs.sink import Sink
from hqsweep.nn import Linear
from hqsweep.ops import kernel
from hqsweep.ops.fingerprint import fingerprint
from hqsweep.ops.request import SOURCES
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer, LinearQuantizers
from hqsweep.train import data
from hqsweep.train.loop import Trainer, load_checkpoint, pick_device, save_checkpoint

if TYPE_CHECKING:
    from hqsweep.config import ParityConfig

Rows = Iterator[dict[str, object]]
KEY = RngKey(seed=1, slot="parity", step=3)
STATISTICS_SHAPE = (208, 304)
TRAINING_RECIPES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8",
    "fp8_block": {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"},
    "nvfp4 recipe": {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"},
    "nvfp4 fwd, mxfp8 bwd": "nvfp4|mxfp8@rowwise_dequantized",
    "fp8_delayed": {"input": "fp8_delayed", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2"},
    "fp8_delayed hybrid": {
        "input": "fp8_delayed+history4|fp8_current",
        "weight": "fp8_current|fp8_delayed+most_recent+history1@rowwise_dequantized",
        "grad_output": "mxfp8+e5m2|fp8_delayed+e5m2",
    },
}


def run(config: "ParityConfig", sink: Sink, workspace: Path) -> None:
    """Run the named checks in order; a mismatch is a row, not an exception."""
    device = pick_device(config.parity.device)
    sink.rewind(-1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sink.manifest(device=name, kernel_digest=fingerprint(device))
    names = config.parity.checks
    for i, name in enumerate(names, start=1):
        rows = list(CHECKS[name](config, device))
        sink.parity(rows)
        sink.progress(i, len(names), None, None)


def kernel_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Each format, in both directions of one call, over every distribution, shape and input dtype."""
    for format in _formats(config):
        for distribution in config.parity.distributions:
            for rows, cols in config.parity.shapes:
                for dtype in (torch.bfloat16, torch.float32):
                    x = draw(distribution, rows, cols, config.seed, dtype)
                    case = f"{distribution} {rows}x{cols} {str(dtype).removeprefix('torch.')}"
                    yield from _kernel_rows(format, case, x, device)


def _kernel_rows(format: Format, case: str, x: Tensor, device: torch.device) -> Rows:
    if not kernel.supports(x, format):
        yield skip("cpu", str(format), case, "no compiled kernel: the reference is what runs")
        return
    expected = outcomes(format, x, KEY, "reference")
    if device.type == "cuda":
        again = outcomes(format, x.to(device), KEY, "reference")
        yield row("reference", str(format), case, _cpu_pairs(expected, again))
    yield row("cpu", str(format), case, _pairs(expected, outcomes(format, x, KEY, "kernel")))
    if device.type == "cuda":
        yield row("cuda", str(format), case, _cpu_pairs(expected, outcomes(format, x.to(device), KEY, "kernel")))


def statistics_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Each format over every distribution, on a matrix of six tiles of sums that ends in partial ones."""
    for format in _formats(config):
        for distribution in config.parity.distributions:
            x = draw(distribution, *STATISTICS_SHAPE, config.seed).to(device)
            if not kernel.supports(x, format):
                yield skip("statistics", str(format), distribution, "no compiled kernel: the reference is what runs")
                continue
            expected, actual = (gathered(format, x, KEY, backend) for backend in ("reference", "kernel"))
            yield row("statistics", str(format), distribution, same_up_to_rounding(expected, actual))


def vanilla_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Linear against mm_t of operands that the torch reference encodes, outside of any module or quantizer.

    A format stands in both directions of all three tensors, less what it may not have there: row_scaled columnwise, the
    Hadamard transform rowwise and on weights.
    """
    x, w, dy = _problem(config, device)
    for format in _formats(config):
        row_format, column = _without(format, rht=False, rht_signed=True), _without(format, row_scaled=False)
        weight_column = _without(column, rht=False, rht_signed=True)
        quantizers = {t: f"{row_format}|{column}" for t in ("input", "grad_output")}
        quantizers["weight"] = f"{row_format}|{weight_column}"
        operands = {
            "y": (_by_hand(row_format, x, "input/rowwise"), _by_hand(row_format, w, "weight/rowwise")),
            "dx": (
                _by_hand(row_format, dy, "grad_output/rowwise"),
                _by_hand(weight_column, w.t(), "weight/columnwise"),
            ),
            "dw": (_by_hand(column, dy.t(), "grad_output/columnwise"), _by_hand(column, x.t(), "input/columnwise")),
        }
        dtypes = {"y": x.dtype, "dx": x.dtype, "dw": torch.float32}
        expected = {name: mm_t(*pair, out_dtype=dtypes[name]) for name, pair in operands.items()}
        actual = _linear(LinearQuantizers.parse(quantizers, "parity"), x, w, dy)
        yield row("vanilla", str(format), "linear", _pairs(expected, actual))


def _by_hand(format: Format, matrix: Tensor, slot: str) -> ExactOperand:
    """The operand by the reference, under the key that the module named "parity" has for that slot."""
    key = RngKey(seed=0, slot=f"parity/linear/{slot}", step=0)
    return format.operand(format.encode(matrix, None, key), tuple(matrix.shape))


def _without(format: Format, **options: bool) -> Format:
    return replace(format, **options) if isinstance(format, NVFP4) else format


def routing_check(config: "ParityConfig", device: torch.device) -> Rows:
    """All ordered pairs of formats that can stand in both directions."""
    x, w, dy = _problem(config, device)
    names = [str(f) for f in _formats(config) if not any(getattr(f, o, False) for o in ("rht", "sr", "row_scaled"))]
    alone = {name: _linear(LinearQuantizers.parse(name, "parity"), x, w, dy) for name in names}
    for a, b in permutations(names, 2):
        quantizers = {"input": f"{a}|{b}", "weight": f"{a}|{b}", "grad_output": b}
        mixed = _linear(LinearQuantizers.parse(quantizers, "parity"), x, w, dy)
        expected = {"y": alone[a]["y"], "dx": alone[b]["dx"], "dw": alone[b]["dw"]}
        yield row("routing", f"{a}|{b}", "linear", _pairs(expected, mixed))


def pairs_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Every ordered pair of formats with both sources, in one call, against the reference in two steps."""
    x, _, _ = _problem(config, device)
    rowwise = [f for f in _formats(config) if not getattr(f, "rht", False)]
    columnwise = [f for f in _formats(config) if not getattr(f, "row_scaled", False)]
    for a in rowwise:
        for b in columnwise:
            for source in SOURCES:
                quantizer = HybridQuantizer(a, b, source)
                made = quantizer.quantize(x, key=KEY)
                row_key, column_key = (RngKey(seed=1, slot=f"parity/{d}", step=3) for d in ("rowwise", "columnwise"))
                first = a.encode(x, None, row_key)
                original = a.decode(first, tuple(x.shape)).to(x.dtype) if source == "rowwise_dequantized" else x
                second = b.encode(original.t(), None, column_key)
                pairs = {f"rowwise {name}": (t, made.rowwise.buffers[name]) for name, t in first.items()}
                pairs |= {f"columnwise {name}": (t, made.columnwise.buffers[name]) for name, t in second.items()}
                subject = f"{a}|{b}" if source == "original" else f"{a}|{b}@{source}"  # also where a is b
                yield row("pairs", subject, "both directions", pairs)


def repeat_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Two trainings of a small GPT from the same config: all weights, and every metric."""
    for name in TRAINING_RECIPES:
        first, second = (_trained(config, name, device) for _ in range(2))
        yield row("repeat", name, "small GPT", _pairs(first, second))


def resume_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Half the steps, a checkpoint on disk, a new process state, the other half; against all steps at once."""
    for name in TRAINING_RECIPES:
        yield row("resume", name, "small GPT", _pairs(_trained(config, name, device), _resumed(config, name, device)))


def weights_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Both kinds of weights from the same config; then held ones with and without an interruption."""
    for name in TRAINING_RECIPES:
        made = _trained(config, name, device)
        plain = {k: v for k, v in made.items() if ".states.weight_" not in k}  # where held ones are a write ahead
        held, resumed = (run(config, name, device, quantized_weights=True) for run in (_trained, _resumed))
        yield row("weights", name, "small GPT", _pairs(plain, held))
        yield row("weights", name, "small GPT, resumed", _pairs(held, resumed))


def _trained(
    config: "ParityConfig", recipe: str, device: torch.device, *, quantized_weights: bool = False
) -> dict[str, Tensor]:
    return _finish(_trainer(config, recipe, device, quantized_weights))


def _resumed(
    config: "ParityConfig", recipe: str, device: torch.device, *, quantized_weights: bool = False
) -> dict[str, Tensor]:
    first = _trainer(config, recipe, device, quantized_weights)
    for done in first.steps():
        if 2 * done.step >= first.config.train.steps:
            break
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(first, Path(folder))
        second = _trainer(config, recipe, device, quantized_weights)
        load_checkpoint(second, Path(folder))
    return _finish(second)


def _trainer(config: "ParityConfig", recipe: str, device: torch.device, quantized_weights: bool) -> Trainer:
    training = config.training(recipe, TRAINING_RECIPES[recipe], quantized_weights=quantized_weights)
    return Trainer(training, data.load(training.data), training.recipe.build(), device)


def _finish(trainer: Trainer) -> dict[str, Tensor]:
    """Losses, the FP32 value and the moments of every parameter, the codes of quantized ones, and all buffers."""
    done = list(trainer.steps())[-1]
    made = {"losses": torch.tensor([done.metrics["train_loss"], done.metrics["val_loss"]], dtype=torch.float64)}
    for name, p in trainer.model.named_parameters():
        state = trainer.optimizer.state[p]
        made |= {name: trainer.optimizer.master_param(p).detach()}
        made |= {f"{name}.{moment}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        if isinstance(p, HybridQuantizedTensor):
            made |= {f"{name}.{part}": buffer for part, buffer in p.buffers.items()}
    return made | dict(trainer.model.named_buffers())


def _linear(quantizers: LinearQuantizers, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    module = Linear(w.shape[1], w.shape[0], name="parity", quantizers=quantizers, dtype=x.dtype).to(x.device)
    with torch.no_grad():
        module.weight.copy_(w)
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}


def _problem(config: "ParityConfig", device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [64, 128], w [96, 128], dy [64, 96] in bfloat16."""
    shapes = ((64, 128), (96, 128), (64, 96))
    return tuple(draw("heavy", *s, config.seed + i).clamp(-1e3, 1e3).to(device) for i, s in enumerate(shapes))


def _cpu_pairs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (expected[name], actual[name].cpu()) for name in expected}


def _pairs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (expected[name], actual[name]) for name in expected}


def _formats(config: "ParityConfig") -> list[Format]:
    return [parse(text) for text in config.parity.formats]


CHECKS: dict[str, Callable[["ParityConfig", torch.device], Rows]] = {
    "kernel": kernel_check,
    "statistics": statistics_check,
    "vanilla": vanilla_check,
    "routing": routing_check,
    "pairs": pairs_check,
    "repeat": repeat_check,
    "resume": resume_check,
    "weights": weights_check,
}
