"""The start of a training from other weights: from a trunk, as a fork, or from another program's checkpoint, as a
trunk.

A fork takes the whole state of a trunk into a model in its own recipe. Weights and their masters, moments, the count of
updates and keys of random bits go on. Where trunk and arm hold a weight in the same quantizer, its bytes go on; else it
is quantized from its master, as it would have been at that step. States of delayed scaling go on where the arm has the
same slot, direction and length of history; else they begin anew.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hqsweep.checkpoints.checkpoint import Checkpoint
from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import Loaded
from hqsweep.config.study import ForkConfig
from hqsweep.config.train import ParallelConfig
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.core.parameter import note_update
from hqsweep.optim import MASTER, FusedAdam
from hqsweep.optim.adam import OWN_MASTERS
from hqsweep.parallel.shared.held import link_held
from hqsweep.parallel.wire.local import is_spread, local, spread_out, write_held
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.recipe.sections import slots
from hqsweep.train.adapter import keyed_seed

Names = tuple[str, ...]
"""The names of one weight. A tied weight has several, and a rank may have it under only one of them."""


@torch.no_grad()
def start_from(model: nn.Module, optimizer: FusedAdam, state: Mapping[str, Any]) -> None:
    """Give model and optimizer the state of a Trainer of the same model in any recipe. Over ranks, the state has this
    rank's parts."""
    optimizer.load_state_dict(state["optimizer"])
    weights, keys = dict(state["model"]), _keys(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, p in named.items():
        if p in keys and getattr(local(weights[name]), "quantizer", None) == local(p).quantizer:
            del keys[p]
    others = {name for name, p in named.items() if p in keys}
    model.load_state_dict({name: value for name, value in weights.items() if name not in others}, strict=not others)
    _keep_states(model)
    values = {p: optimizer.state.get(p, {}).get(MASTER, weights[name]) for name, p in named.items()}
    for p, key in keys.items():
        write_held(p, local(values[p]), _later(key, state["step"]))
    for name, p in named.items():  # weights that only the trunk holds quantized
        if isinstance(local(weights[name]), HybridQuantizedTensor) and not isinstance(local(p), HybridQuantizedTensor):
            local(p).copy_(local(values[p]))
            if p.dtype in OWN_MASTERS and p in optimizer.state:
                optimizer.state[p].pop(MASTER, None)


@torch.no_grad()
def start_from_folder(model: nn.Module, optimizer: FusedAdam, folder: Path) -> dict[str, Any]:
    """start_from a folder that the ranks of a Trainer have written. A collective of any number of ranks.

    Returns the entries beside model and optimizer.
    """
    from hqsweep.checkpoints.sharded_load import encode_again, load_but_codes

    keys = _keys(model)
    position, held = load_but_codes(model, optimizer, folder)
    _keep_states(model)
    for weight in held:
        p = weight.parameter
        if weight.quantizer == str(local(p).quantizer):
            encode_again(weight)
        else:
            write_held(p, weight.value, _later(keys[p], position["step"]))
    return position


def check_layers(dims: ParallelConfig) -> None:
    """UserError for the state of one process where ranks hold layers of their own."""
    if dims.pp > 1:
        raise UserError(
            "fork.trunk: it is the state of one process, and ranks with layers of their own (train.parallel.pp)"
            " go on from a folder that ranks wrote; give another, or pp=1"
        )


@torch.no_grad()
def take_parts(model: nn.Module, optimizer: FusedAdam, whole: nn.Module, whole_optimizer: FusedAdam) -> None:
    """Copy this rank's parts of a whole model and its optimizer into the same model over ranks. A collective.

    Returns at once where `whole` is the model itself, as for one rank.
    """
    if whole is model:
        return
    from hqsweep.checkpoints.sharded_state import buffers_of, parameters_of

    weights, buffers = parameters_of(whole), buffers_of(whole)
    for name, buffer in buffers_of(model).items():
        local(buffer).copy_(local(spread_out(buffers[name].to(buffer.device), buffer)))
    for name, p in parameters_of(model).items():
        state, own = whole_optimizer.state.get(weights[name], {}), local(p)
        optimizer.state[p] = {
            key: spread_out(value.to(p.device), p) if value.shape == p.shape else value.clone()
            for key, value in state.items()
        }
        value = local(spread_out(whole_optimizer.master_param(weights[name]).to(p.device), p))
        if isinstance(own, HybridQuantizedTensor):
            write_held(p, value, weights[name].metadata.key)
        else:
            own.copy_(value)


def _keys(model: nn.Module) -> dict[nn.Parameter, RngKey | None]:
    """The keys of the weights that are held quantized."""
    return {p: local(p).metadata.key for p in model.parameters() if isinstance(local(p), HybridQuantizedTensor)}


def _later(key: RngKey | None, steps: int) -> RngKey | None:
    return key and replace(key, step=key.step + steps)


def _keep_states(model: nn.Module) -> None:
    for module in quantized_modules(model):
        module.states.keep(slots(module.quantizers))
    link_held(model)


def shapes_of(model: nn.Module) -> dict[Names, torch.Size]:
    """All names of a weight -> its shape, in order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return {tuple(names[p]): p.shape for p in model.parameters()}


@torch.no_grad()
def perturb(
    model: nn.Module, optimizer: FusedAdam, noise: float, key: tuple[int, int], shapes: Mapping[Names, torch.Size]
) -> None:
    """Multiply every weight (its master, where it has one) by 1 + noise * eps, eps ~ N(0, 1) keyed by (seed, step).

    shapes: the shapes of all weights of the whole model, in order. eps is drawn for these, and a rank takes its part.
    """
    drawn, own_weights = torch.Generator().manual_seed(keyed_seed(*key)), dict(model.named_parameters())
    for names, shape in shapes.items():
        eps = torch.randn(shape, generator=drawn)
        p = next((own_weights[name] for name in names if name in own_weights), None)
        if p is None:  # it belongs to another rank's layer
            continue
        master = local(optimizer.master_param(p))
        master.mul_(1 + noise * local(spread_out(eps.to(master.device), p)))
        if isinstance(own := local(p), HybridQuantizedTensor):
            write_held(p, master, own.metadata.key)
        elif master is not own:
            own.copy_(master)
        if is_spread(p):  # the write to the part did not count
            torch.autograd.graph.increment_version(p)
            note_update()


ABOVE = "above_source"
"""The key, in a trunk's facts, of the lines about points whose loss is above the loss of its checkpoint."""


class Beginning(Protocol):
    """A Trainer, as the start from another program's checkpoint knows it."""

    step: int
    val_loss: float | None
    kept: Collection[int]
    trunk: dict[str, Any]

    def load_weights(self, checkpoint: Checkpoint) -> Loaded:
        """Take a checkpoint's weights, and its moments if it has any."""

    def evaluate(self) -> float:
        """The validation loss."""


def begin_source(trainer: Beginning, fork: ForkConfig) -> None:
    """Give a trainer the weights of its trunk's checkpoint, and the moments if it has any. Its facts get the
    checkpoint's loss.

    UserError where the checkpoint is another than was planned, or belongs to another model.
    """
    checkpoint = inspect_checkpoint(Path(fork.source))
    if checkpoint.sha256 != fork.source_hash:
        raise UserError(
            f"fork.trunk: {fork.source} is another checkpoint than it was when this run was planned; give that one, or"
            " give the sweep's command again, which makes runs of the new one"
        )
    loaded = trainer.load_weights(checkpoint)
    trainer.trunk = {
        "source_val_loss": trainer.evaluate(), "source_step": loaded.step, "source_moments": loaded.moments > 0,
        ABOVE: [],
    }  # fmt: skip


def above_source(trainer: Beginning) -> str | None:
    """Return a line at a trunk's point if its loss is above the loss of its checkpoint; else None.

    A trunk alone cannot tell whether the difference is more than noise; report.rewarm does.
    """
    before = trainer.trunk.get("source_val_loss")
    if before is None or trainer.step not in trainer.kept or trainer.val_loss is None or trainer.val_loss <= before:
        return None
    excess = 100 * (trainer.val_loss / before - 1)
    line = (
        f"at step {trainer.step} val_loss is {trainer.val_loss:.4f}, {excess:.2f} % above the {before:.4f} of the"
        " checkpoint that this trunk began from; hqsweep compare says whether that is more than the study's noise"
    )
    trainer.trunk[ABOVE] = [*trainer.trunk[ABOVE], line]
    return line
