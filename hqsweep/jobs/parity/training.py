"""Checks of the parity job that train a small GPT: two ways to the same bytes, in every weight, moment and loss
of every step.

repeat     the same training twice; on a GPU two more columns:
           graph      training as it is by default, as a CUDA graph, against training whose every step is sampled, which
                      is no graph and has nothing fused with quantization
           operators  the loss of each of 100 steps within 2e-3 of that by torch's operators (train.compile=off)
resume     training interrupted by a checkpoint against uninterrupted training
weights    training with quantized weights and FP32 masters against training that quantizes FP32 weights at every use;
           then the same interrupted by a checkpoint, with the codes
recompute  training that computes layers, or the cores of attention, again in backward against training that keeps all
offload    training whose activations wait in CPU memory against training that keeps them where they are
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from hqsweep.config.job import ParityConfig
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer

RECIPES = {
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

GRAPH_STEPS = 12
LOSS_STEPS = 100
LOSS_BATCH = {"batch": 32, "context": 128}
"""The batches of the training whose losses are compared: a mean over 4,096 tokens.

Over the 128 tokens of the other trainings the loss of NVFP4 moves by up to 7e-3 when sums have another order, because
few tokens do not average the roundings.
"""
LOSS_RTOL = 2e-3
"""The relative tolerance of losses whose sums have another order, over LOSS_STEPS steps."""


def repeat_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of two trainings from the same config, and on a GPU of the other ways to run one."""
    for name in RECIPES:
        first, second = (_trained(config, name, device) for _ in range(2))
        yield row("repeat", name, "small GPT", named_pairs(first, second))
        if device.type == "cuda":
            yield graph_row(config, name, device)
            yield operators_row(config, name, device)


def graph_row(config: ParityConfig, recipe: str, device: torch.device) -> dict[str, object]:
    """The row of a default training against the same training with every step sampled."""
    graph, eager = (_trained(config, recipe, device, sampled=sampled, steps=GRAPH_STEPS) for sampled in (False, True))
    return row("graph", recipe, "small GPT", named_pairs(eager, graph))


def operators_row(config: ParityConfig, recipe: str, device: torch.device) -> dict[str, object]:
    """A row with PASS where the loss of every step is within LOSS_RTOL of the loss by torch's operators."""
    options = {"steps": LOSS_STEPS, "log_every": 1, **LOSS_BATCH}
    ours, torchs = (_losses(_trainer(config, recipe, device, compile=mode, **options)) for mode in ("auto", "off"))
    errors = (ours / torchs - 1).abs()
    note = f"largest relative difference {errors.max():.1e}, allowed {LOSS_RTOL:g}"
    missed = int((~(errors <= LOSS_RTOL)).sum())
    counted = {"status": "FAIL" if missed else "PASS", "total": len(errors), "mismatches": missed, "note": note}
    return row("operators", recipe, "small GPT", {}) | counted


def _losses(trainer: Trainer) -> Tensor:
    """float64 [steps]: the loss of every step."""
    return torch.tensor([done.loss for done in trainer.steps()], dtype=torch.float64)


def resume_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of an interrupted training, with a checkpoint on disk and a new process state, against all steps at once."""
    for name in RECIPES:
        whole, resumed = _trained(config, name, device), _resumed(config, name, device)
        yield row("resume", name, "small GPT", named_pairs({step: whole[step] for step in resumed}, resumed))


def weights_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of both kinds of weights from the same config, then of held ones with and without an interruption."""
    for name in RECIPES:
        trained = _trained(config, name, device)
        plain = {
            k: v for k, v in trained.items() if ".states.weight_" not in k
        }  # the states of held weights are a write ahead
        held, resumed = (run(config, name, device, quantized_weights=True) for run in (_trained, _resumed))
        yield row("weights", name, "small GPT", named_pairs(plain, held))
        yield row("weights", name, "small GPT, resumed", named_pairs({step: held[step] for step in resumed}, resumed))


def recompute_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of each part that backward can compute again."""
    for name in RECIPES:
        plain = _trained(config, name, device)
        for part in ("layer", "attention"):
            again = _trained(config, name, device, recompute=part)
            yield row("recompute", name, f"small GPT, {part}", named_pairs(plain, again))


def offload_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of offload alone, and together with layers that are computed again and whose inputs wait."""
    for name in RECIPES:
        plain = _trained(config, name, device)
        for case, options in (("small GPT", {}), ("small GPT, layers recomputed", {"recompute": "layer"})):
            away = _trained(config, name, device, offload=True, **options)
            yield row("offload", name, case, named_pairs(plain, away))


def _trained(config: ParityConfig, recipe: str, device: torch.device, **options: object) -> dict[str, Tensor]:
    """The state after a training. options: as config.training takes them."""
    return _finish(_trainer(config, recipe, device, **options))


def _resumed(config: ParityConfig, recipe: str, device: torch.device, **options: object) -> dict[str, Tensor]:
    first = _trainer(config, recipe, device, **options)
    for done in first.steps():
        if 2 * done.step >= first.config.train.steps:
            break
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(first, Path(folder))
        second = _trainer(config, recipe, device, **options)
        load_checkpoint(second, Path(folder))
    return _finish(second)


def _trainer(config: ParityConfig, recipe: str, device: torch.device, **options: object) -> Trainer:
    training = config.training(recipe, RECIPES[recipe], **options)
    return Trainer(training, data.load(training.data), training.recipe.build(), device)


def _finish(trainer: Trainer) -> dict[str, Tensor]:
    """Run the remaining steps. Returns the state of model and optimizer, and the losses that are logged."""
    tensors: dict[str, Tensor] = {}
    for done in trainer.steps():
        losses = {name: torch.tensor(value, dtype=torch.float64) for name, value in done.metrics.items()}
        tensors |= {f"step {done.step} {name}": tensor for name, tensor in (losses | _state(trainer)).items()}
    return tensors


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """The FP32 value and the moments of every parameter, the codes of quantized ones, and all buffers."""
    tensors = dict(trainer.model.named_buffers())
    for name, p in trainer.model.named_parameters():
        state = trainer.optimizer.state[p]
        tensors[name] = trainer.optimizer.master_param(p)
        tensors |= {f"{name}.{moment}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        if isinstance(p, HybridQuantizedTensor):
            tensors |= {f"{name}.{part}": buffer for part, buffer in p.buffers.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


TRAINING_CHECKS: dict[str, Check] = {
    "repeat": repeat_check,
    "resume": resume_check,
    "weights": weights_check,
    "recompute": recompute_check,
    "offload": offload_check,
}
