"""parity: is the arithmetic what it claims to be? Every check compares bytes, and a row holds the first that differs.

kernel               compiled kernel against the torch reference: codes, scales, amaxes and the exact operand; on a
                     GPU also the reference and the kernel there, against the CPU's bytes
vanilla              Linear with one format in both directions against its GEMMs composed by hand
routing              Linear with a|b: forward equals the run with a alone, gradients equal the run with b alone
rowwise_dequantized  the columnwise operand equals quantize(dequantize(rowwise)) done in two steps
repeat               the same training twice
resume               training interrupted by a checkpoint against uninterrupted training
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
from hqsweep.jobs.sink import Sink
from hqsweep.nn import Linear
from hqsweep.ops import kernel, quantize
from hqsweep.ops.fingerprint import fingerprint
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.recipe import LinearQuantizers
from hqsweep.train import data
from hqsweep.train.loop import Trainer, load_checkpoint, pick_device, save_checkpoint

if TYPE_CHECKING:
    from hqsweep.config import ParityConfig

Rows = Iterator[dict[str, object]]
KEY = RngKey(seed=1, slot="parity", step=3)
TRAINING_RECIPES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8",
    "fp8_block": {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"},
    "nvfp4 recipe": {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"},
    "nvfp4 fwd, mxfp8 bwd": "nvfp4|mxfp8@rowwise_dequantized",
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
    """Each format over every distribution, shape, input dtype and both orientations of the input."""
    for format in _formats(config):
        for distribution in config.parity.distributions:
            for rows, cols in config.parity.shapes:
                for dtype in (torch.bfloat16, torch.float32):
                    x = draw(distribution, rows, cols, config.seed, dtype)
                    for direction, matrix in (("rowwise", x), ("columnwise", x.t())):
                        case = f"{distribution} {rows}x{cols} {str(dtype).removeprefix('torch.')} {direction}"
                        yield from _kernel_rows(format, case, matrix, device)


def _kernel_rows(format: Format, case: str, x: Tensor, device: torch.device) -> Rows:
    if not kernel.supports(x, format):
        yield skip("kernel", str(format), case, "no compiled kernel: the reference is what runs")
        return
    expected = format.encode(x, None, KEY)
    actual = quantize.encode(x, format, key=KEY, backend="kernel")
    pairs = {name: (expected[name], actual[name]) for name in expected}
    exact, reference = (quantize.exact_operand(x, format, key=KEY, backend=b) for b in ("kernel", "reference"))
    pairs["exact operand"] = (reference.matrix.float(), exact.matrix.to(reference.matrix.dtype).float())
    yield row("kernel", str(format), case, pairs)
    if device.type == "cuda":
        on_device = x.to(device)
        yield row("cuda reference", str(format), case, _cpu_pairs(expected, format.encode(on_device, None, KEY)))
        if kernel.supports(on_device, format):
            pairs = _cpu_pairs(expected, quantize.encode(on_device, format, key=KEY, backend="kernel"))
            exact = quantize.exact_operand(on_device, format, key=KEY, backend="kernel")
            pairs["exact operand"] = (_one_nan(reference.matrix), _one_nan(exact.matrix.cpu()))
            yield row("cuda kernel", str(format), case, pairs)


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


def dequantized_check(config: "ParityConfig", device: torch.device) -> Rows:
    """All ordered pairs: the hybrid's columnwise buffers against encode(dequantize(rowwise).T) by the reference."""
    x, _, _ = _problem(config, device)
    rowwise = [f for f in _formats(config) if not getattr(f, "rht", False)]
    columnwise = [f for f in _formats(config) if not getattr(f, "row_scaled", False)]
    for a in rowwise:
        for b in columnwise:
            column = HybridQuantizer(a, b, "rowwise_dequantized").quantize(x, rowwise=None, key=KEY).columnwise
            row_key, column_key = (RngKey(seed=1, slot=f"parity/{d}", step=3) for d in ("rowwise", "columnwise"))
            dequantized = a.decode(a.encode(x, None, row_key), tuple(x.shape)).to(x.dtype)
            expected = b.encode(dequantized.t(), None, column_key)
            pairs = {name: (expected[name], column.buffers[name]) for name in expected}
            yield row("rowwise_dequantized", f"{a}|{b}", "columnwise", pairs)


def repeat_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Two trainings of a small GPT from the same config: all weights, and every metric."""
    for name in TRAINING_RECIPES:
        first, second = (_trained(config, name, device) for _ in range(2))
        yield row("repeat", name, "small GPT", _pairs(first, second))


def resume_check(config: "ParityConfig", device: torch.device) -> Rows:
    """Half the steps, a checkpoint on disk, a new process state, the other half; against all steps at once."""
    for name in TRAINING_RECIPES:
        yield row("resume", name, "small GPT", _pairs(_trained(config, name, device), _resumed(config, name, device)))


def _trained(config: "ParityConfig", recipe: str, device: torch.device) -> dict[str, Tensor]:
    trainer = _trainer(config, recipe, device)
    return _finish(trainer)


def _resumed(config: "ParityConfig", recipe: str, device: torch.device) -> dict[str, Tensor]:
    first = _trainer(config, recipe, device)
    for done in first.steps():
        if 2 * done.step >= first.config.train.steps:
            break
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(first, Path(folder))
        second = _trainer(config, recipe, device)
        load_checkpoint(second, Path(folder))
    return _finish(second)


def _trainer(config: "ParityConfig", recipe: str, device: torch.device) -> Trainer:
    training = config.training(recipe, TRAINING_RECIPES[recipe])
    return Trainer(training, data.load(training.data), training.recipe.build(), device)


def _finish(trainer: Trainer) -> dict[str, Tensor]:
    done = list(trainer.steps())[-1]
    losses = torch.tensor([done.metrics["train_loss"], done.metrics["val_loss"]], dtype=torch.float64)
    return {"losses": losses} | {name: p.detach() for name, p in trainer.model.named_parameters()}


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


def _one_nan(x: Tensor) -> Tensor:
    """x with one bit pattern for every NaN: torch's float32 to bfloat16 has several, by device and vector width."""
    return torch.where(x.isnan(), torch.nan, x)


def _pairs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (expected[name], actual[name]) for name in expected}


def _formats(config: "ParityConfig") -> list[Format]:
    return [parse(text) for text in config.parity.formats]


CHECKS: dict[str, Callable[["ParityConfig", torch.device], Rows]] = {
    "kernel": kernel_check,
    "vanilla": vanilla_check,
    "routing": routing_check,
    "rowwise_dequantized": dequantized_check,
    "repeat": repeat_check,
    "resume": resume_check,
}
