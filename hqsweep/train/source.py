"""The start of a trunk that begins from a checkpoint of another program, and the distance of its losses from the
checkpoint's at its points."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from hqsweep.checkpoints.foreign.checkpoint import Checkpoint
from hqsweep.checkpoints.foreign.inspect import inspect_checkpoint
from hqsweep.checkpoints.foreign.load import Loaded
from hqsweep.config.study import ForkConfig
from hqsweep.errors import UserError

ABOVE = "above_source"
"""The key, in a trunk's facts, of a line for each point at which its loss is above that of its checkpoint."""


class Beginning(Protocol):
    """A Trainer as its first checkpoint, of another program, knows it."""

    step: int
    val_loss: float | None
    kept: Collection[int]
    trunk: dict[str, Any]

    def load_weights(self, checkpoint: Checkpoint) -> Loaded:
        """Take the weights, and the moments where there are some, of a checkpoint of another program."""

    def evaluate(self) -> float:
        """The validation loss."""


def begin_source(trainer: Beginning, fork: ForkConfig) -> None:
    """Give a trainer the weights of the checkpoint that its trunk begins from, and the moments where that has some; its
    facts then have the checkpoint's loss.

    UserError where it is another checkpoint than was planned, or that of another model.
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
    """A line, at a point of a trunk at which the loss is above its checkpoint's; None elsewhere. A trunk alone cannot
    say whether that is more than noise: report.rewarm does."""
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
