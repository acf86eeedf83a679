"""The start of a trunk that begins from a checkpoint of another program, and whether it has recovered from that."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.load import load_checkpoint
from hqsweep.config.fork import SETTLED_PCT, ForkConfig
from hqsweep.errors import UserError

UNSETTLED = "unsettled"
"""Key of a trunk's facts: a warning for each point at which it has not recovered."""


class Beginning(Protocol):
    """What a Trainer is to the checkpoint that it begins from."""

    model: nn.Module
    optimizer: Optimizer
    step: int
    val_loss: float | None
    kept: Collection[int]
    trunk: dict[str, Any]
    runner: Any

    def evaluate(self) -> float:
        """The validation loss."""


def begin_source(trainer: Beginning, fork: ForkConfig) -> None:
    """Give a trainer the weights of the checkpoint that its trunk begins from, and the moments where that has some; its
    facts say which loss the checkpoint came with.

    UserError where it is another checkpoint than was planned, or one of another model.
    """
    checkpoint = inspect_checkpoint(Path(fork.source))
    if checkpoint.sha256 != fork.source_hash:
        raise UserError(
            f"fork.trunk: {fork.source} is another checkpoint than it was when this run was planned; give that one, or"
            " give the sweep's command again, which makes runs of the new one"
        )
    loaded = load_checkpoint(checkpoint, trainer.model, trainer.optimizer)
    trainer.runner.forget()
    trainer.trunk = {
        "source_val_loss": trainer.evaluate(), "source_step": loaded.step, "source_moments": loaded.moments > 0,
        UNSETTLED: [],
    }  # fmt: skip


def unsettled(trainer: Beginning) -> str | None:
    """A warning at a point of a trunk at which the loss is still above its checkpoint's; None elsewhere."""
    before = trainer.trunk.get("source_val_loss")
    if before is None or trainer.step not in trainer.kept or trainer.val_loss is None:
        return None
    excess = 100 * (trainer.val_loss / before - 1)
    if excess <= SETTLED_PCT:
        return None
    line = (
        f"the re-warm has not settled at step {trainer.step}: val_loss is {trainer.val_loss:.4f}, {excess:.2f} % above"
        f" the {before:.4f} of the checkpoint; fork later (fork.at), or train at a lower train.lr"
    )
    trainer.trunk[UNSETTLED] = [*trainer.trunk[UNSETTLED], line]
    return line
