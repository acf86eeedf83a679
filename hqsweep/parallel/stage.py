"""Stages of a pipeline: some layers of a GPT as a module, and the same as torch.distributed.pipelining runs it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from hqsweep.nn.core.residual import add_branch
from hqsweep.nn.layers.layer_stack import through
from hqsweep.nn.linear.linear_loss import forms_loss
from hqsweep.parallel.shared.vocabulary import cross_entropy, vocabulary_group
from hqsweep.parallel.shared.weight import gains_summed_together


class StageOfLayers(nn.Module):
    """Some layers of a GPT: tokens int64 [B, T], or the stream [B, T, D] of the stage before -> the stream after them,
    or from the last stage float32 [1], the mean cross entropy with targets.

    From the first layer with experts on, the balances float32 [n] of the n such layers so far go beside the stream.
    In training the last stage adds load_balance times their mean, and divides the sum by `share`.
    """

    def __init__(self, model: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = model.embedding if is_first else None
        self.layers = nn.ModuleList(model.layers[index] for index in layers)
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)
        self.load_balance = 0.0
        self.share: int | None = None
        """The divisor of the loss in training; None in evaluations."""
        self.tokens: list[list[Tensor]] = []
        """The tokens int64 [E] of the experts of each layer that has some, for each microbatch."""
        self.balances: list[Tensor] = []
        """The mean of the balances of all layers, for each microbatch, in the last stage."""

    def forward(self, x: Tensor, balances: Tensor | None = None, targets: Tensor | None = None) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        with gains_summed_together(self.layers):
            stream = through(self.layers, x)
        self.tokens.append(stream.tokens)
        every = ([] if balances is None else [balances]) + [balance.view(1) for balance in stream.balances]
        if self.norm is None:
            x = add_branch(stream.x, stream.branch)
            return (x, torch.cat(every)) if every else x
        h = self.norm.added(stream.x, stream.branch, self.head.dtype)[1]
        if forms_loss(self.head, h):
            loss = self.head.loss(h, targets)
        else:
            loss = cross_entropy(self.head(h), targets, vocabulary_group(self.head))
        if self.share is None:
            return torch.stack([loss])  # which is no view, as fully_shard asks for
        if every:
            balance = torch.cat(every).mean()
            self.balances.append(balance.detach())
            loss = loss + self.load_balance * balance
        return torch.stack([loss / self.share])


class Stage(PipelineStage):
    """A stage whose microbatches are each computed in a context of their own. Where fully_shard has cut its layers, the
    backward of the last microbatch sums gradients over ranks."""

    def __init__(
        self,
        layers: StageOfLayers,
        index: int,
        stages: int,
        device: torch.device,
        *,
        at: Callable[[int], AbstractContextManager],
        **options: Any,
    ) -> None:
        super().__init__(_Plain(layers), index, stages, device, **options)
        self._layers, self._at = layers, at

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._at(fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **options)
            except RuntimeError as error:  # torch's, around what the layers raised
                raise error.__cause__ or error from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if self.has_backward and isinstance(self._layers, FSDPModule):
            self._layers.set_requires_gradient_sync(bwd_chunk_id == self.chunks - 1)
        with self._at(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)


class _Plain(nn.Module):
    """The module that torch's schedules see of a stage. If they saw one under fully_shard, they would keep weights
    gathered for the whole step, by calls that differ from version to version."""

    def __init__(self, layers: StageOfLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layers(*args, **options)
