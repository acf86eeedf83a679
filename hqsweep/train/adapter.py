"""ModelAdapter: all that the training loop asks of a model, hqsweep's own GPT or a user's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""By the names of train.dtype."""
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
    def of(cls, parts: Sequence["Balance"], of_ranks: Callable[[Tensor], Tensor]) -> "Balance":
        """Of the parts of a batch, without gradients. of_ranks: [...] -> [ranks, ...], what each rank has."""
        loss = of_ranks(torch.stack([part.loss.detach() for part in parts])).mean()
        if not parts[0].tokens:
            return cls(loss=loss, tokens=[])
        counts = torch.stack([torch.cat(part.tokens) for part in parts]).sum(dim=0)
        return cls(loss=loss, tokens=list(of_ranks(counts).sum(dim=0).split([len(c) for c in parts[0].tokens])))

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
    methods: Sequence[str]
    """Of the model, that are called as its forward is."""
    why_eager: str | None
    """Why its steps cannot be CUDA graphs, None where they may."""
    facts: Mapping[str, Any]
    """For the manifest."""

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
        """Name of a linear, or of an expert of a grouped one (NAME.EXPERT), -> the master of its weight, where that is
        held quantized, for error statistics."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs and state_dict() of the model has not."""

    def check(self, state: Mapping[str, Any]) -> None:
        """UserError for what was saved of a model of other code."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there, after check()."""

    def unused(self) -> list[str]:
        """Modules that were to compute by the recipe and have not since the start, in order."""
