"""ModelAdapter: all that the training loop asks of a model, hqsweep's own GPT or a user's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes by the names of train.dtype."""
Saving = Callable[[], AbstractContextManager]
"""The context that a model runs in, without its loss, whose tensors for backward are gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """How the L layers with experts of a model distributed the tokens of a forward."""

    loss: Tensor
    """float32 []: the mean over layers of Routing.balance, or the auxiliary loss of a user's model; 0 without
    experts."""
    tokens: list[Tensor]
    """int64 [E] for each such layer; [] where a user's model does not count them."""

    @classmethod
    def of(cls, parts: Sequence["Balance"], of_ranks: Callable[[Tensor], Tensor]) -> "Balance":
        """The balance of a batch from its parts, without gradients. of_ranks: [...] -> [ranks, ...], what each rank
        has."""
        loss = of_ranks(torch.stack([part.loss.detach() for part in parts])).mean()
        if not parts[0].tokens:
            return cls(loss=loss, tokens=[])
        counts = torch.stack([torch.cat(part.tokens) for part in parts]).sum(dim=0)
        return cls(loss=loss, tokens=list(of_ranks(counts).sum(dim=0).split([len(c) for c in parts[0].tokens])))

    def greatest_load(self) -> float:
        """The tokens of the busiest expert over the mean of its layer; the largest of all layers."""
        return max((counts.max() / counts.float().mean()).item() for counts in self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The losses of a batch: what is compared (the cross entropy) and what is minimized, both [], and how experts were
    used."""

    cross_entropy: Tensor
    minimized: Tensor
    balance: Balance


def by_decay(model: nn.Module, decayed: Iterable[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(the parameters that decay, the others), each in the model's order; so an optimizer counts them."""
    known, parameters = {id(weight) for weight in decayed}, list(model.parameters())
    return [p for p in parameters if id(p) in known], [p for p in parameters if id(p) not in known]


class ModelAdapter(Protocol):
    """A model as the training loop knows it."""

    model: nn.Module
    has_aux: bool
    """Whether there is an auxiliary loss, which is reported."""
    methods: Sequence[str]
    """The names of the model's methods that are called as its forward is."""
    autocast: torch.dtype | None
    """The dtype of torch.autocast in which the model computes; None where it computes without."""
    why_eager: str | None
    """Why its steps cannot be CUDA graphs; None where they may."""
    facts: Mapping[str, Any]
    """Entries of the manifest, and of checkpoints."""
    taken: Mapping[str, Any]
    """The entry of the manifest on what the recipe takes of a user's model."""

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """The losses of inputs and targets, int64 [B, T], under quantization()."""

    def begin(self, key: tuple[int, int, int]) -> None:
        """Prepare for a forward in training: key is (seed, step, microbatch), by which a model may draw random
        numbers."""

    def evaluating(self) -> AbstractContextManager:
        """The context of evaluations."""

    def decayed(self) -> list[Tensor]:
        """The parameters that decay."""

    def saved_inputs(self, tokens: int) -> Iterable[tuple[str, float]]:
        """(name, bytes an element that it keeps of its input) of each linear, for a microbatch of so many tokens."""

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The name of a linear, or of an expert of a grouped one (NAME.EXPERT) -> the master of its weight, where that
        is held quantized, for error statistics."""

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint needs beside the model's state_dict()."""

    def check(self, state: Mapping[str, Any]) -> None:
        """UserError for a state that was saved of a model with other code."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load this state, after check()."""

    def unused(self) -> list[str]:
        """The modules that should compute by the recipe and have not since the start, in order."""
