"""ModelAdapter: all that the training loop asks of a model, hqsweep's own GPT or a user's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


def keyed_seed(*key: int) -> int:
    """A seed for a torch generator, below 2**63, as a function of numbers >= 0."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Name in train.dtype -> dtype."""
Saving = Callable[[], AbstractContextManager]
"""The context of the model's forward without the loss, whose tensors for backward are gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """How the L layers with experts distribute the tokens of a forward."""

    loss: Tensor
    """float32 []: the mean over layers of Routing.balance, or the auxiliary loss of a user's model; 0 without
    experts."""
    tokens: list[Tensor]
    """int64 [E] for each layer with experts; [] where a user's model does not count tokens."""

    @classmethod
    def of(cls, parts: Sequence["Balance"], of_ranks: Callable[[Tensor], Tensor]) -> "Balance":
        """The balance of a batch from the balances of its parts, without gradients.

        of_ranks: a value [...] of this rank -> [ranks, ...], the values of all ranks.
        """
        loss = of_ranks(torch.stack([part.loss.detach() for part in parts])).mean()
        if not parts[0].tokens:
            return cls(loss=loss, tokens=[])
        counts = torch.stack([torch.cat(part.tokens) for part in parts]).sum(dim=0)
        return cls(loss=loss, tokens=list(of_ranks(counts).sum(dim=0).split([len(c) for c in parts[0].tokens])))

    def greatest_load(self) -> float:
        """The largest ratio, over all layers, between the tokens of the busiest expert and the mean of its layer."""
        return max((counts.max() / counts.float().mean()).item() for counts in self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The losses of a batch, both []: the cross entropy, which is compared, and the loss that is minimized."""

    cross_entropy: Tensor
    minimized: Tensor
    balance: Balance


def by_decay(model: nn.Module, decayed: Iterable[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(parameters with weight decay, other parameters), each in the model's order, as optimizers number them."""
    known, parameters = {id(weight) for weight in decayed}, list(model.parameters())
    return [p for p in parameters if id(p) in known], [p for p in parameters if id(p) not in known]


class Compiled(Protocol):
    """Compiled parts of a model, as the training loop knows them (models.compiled.CompiledBlocks)."""

    on: bool
    """Whether anything is compiled."""

    def begin(self) -> None:
        """Compile anew at the next forward in training, after a change of the recipe."""

    def plain(self) -> AbstractContextManager:
        """The context in which the model runs as it is."""


class ModelAdapter(Protocol):
    """A model, as the training loop knows it."""

    model: nn.Module
    has_aux: bool
    """Whether there is an auxiliary loss, which is reported."""
    methods: Sequence[str]
    """The names of methods that compute like the model's forward."""
    autocast: torch.dtype | None
    """The dtype of torch.autocast in which the model computes; None without autocast."""
    why_eager: str | None
    """Why its steps cannot be CUDA graphs; None where they can."""
    compiled: Compiled | None
    """The compiled blocks of a user's model; None where no block is to be compiled."""
    facts: Mapping[str, Any]
    """Entries of the manifest and of checkpoints."""
    taken: Mapping[str, Any]
    """The manifest's entry on the modules of a user's model that the recipe takes."""

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """The losses of inputs and targets, int64 [B, T]. Called under quantization()."""

    def begin(self, key: tuple[int, int, int]) -> None:
        """Prepare for a forward in training. key: (seed, step, microbatch), for a model that draws random numbers."""

    def evaluating(self) -> AbstractContextManager:
        """The context of evaluations."""

    def decayed(self) -> list[Tensor]:
        """The parameters with weight decay."""

    def hidden(self) -> list[Tensor]:
        """The 2D weights of hidden layers, a part of decayed(), which Muon takes."""

    def saved_inputs(self, tokens: int) -> Iterable[tuple[str, float]]:
        """Yield (name, bytes) of each linear: the bytes per element that it keeps of its input.

        tokens: the number of tokens in a microbatch.
        """

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Name of a linear, or NAME.EXPERT -> the master of its weight, for weights that are held quantized. For error
        statistics."""

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint needs beside the model's state_dict()."""

    def check(self, state: Mapping[str, Any]) -> None:
        """UserError for a state that a model with other code has saved."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load this state, after check()."""

    def unused(self) -> list[str]:
        """The modules, in order, that should compute by the recipe and have not computed since the start."""
