"""ModelAdapter: all that the training loop asks of a model, hqsweep's own GPT or a user's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Saving = Callable[[], AbstractContextManager]
"""The context that a model runs in, without its loss, whose tensors for backward are gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """How the L layers with experts of a model shared out the tokens of a forward."""

    loss: Tensor
    """float32 []: the mean over layers of Routing.balance, or what a user's model calls its auxiliary loss; 0 without
    experts."""
    tokens: list[Tensor]
    """int64 [E] for each such layer; [] where a user's model does not tell."""

    @classmethod
    def of(cls, parts: Sequence["Balance"]) -> "Balance":
        """Of the parts of a batch, without gradients."""
        loss = torch.stack([part.loss.detach() for part in parts]).mean()
        return cls(loss=loss, tokens=[torch.stack(c).sum(dim=0) for c in zip(*(p.tokens for p in parts), strict=True)])

    def greatest_load(self) -> float:
        """The most tokens that an expert got over the mean of its layer; the largest of all layers."""
        return max((counts.max() / counts.float().mean()).item() for counts in self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """Of a batch: what is compared (the cross entropy) and what is minimized, both [], and how experts were used."""

    cross_entropy: Tensor
    minimized: Tensor
    balance: Balance


class ModelAdapter(Protocol):
    """What the loop knows of a model."""

    model: nn.Module
    has_aux: bool
    """Whether there is an auxiliary loss, which is reported."""
    why_eager: str | None
    """Why its steps cannot be CUDA graphs, None where they may."""

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """Of inputs and targets, int64 [B, T], under quantization()."""

    def begin(self, key: tuple[int, int, int]) -> None:
        """Before a forward in training: (seed, step, microbatch), by which a model may draw random numbers."""

    def evaluating(self) -> AbstractContextManager:
        """Around evaluations."""

    def decayed(self) -> list[Tensor]:
        """The parameters that weight decay is for."""

    def saved_inputs(self, tokens: int) -> Iterable[tuple[str, float]]:
        """(name, bytes an element that it keeps of its input) of linears, for a microbatch of so many tokens."""

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Name of a linear, or of an expert of a grouped one (NAME.EXPERT), -> the master of its weight, for error
        statistics."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs and state_dict() of the model has not."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""

    def unused(self) -> list[str]:
        """Modules that were to compute by the recipe and have not since the start, in order."""
