"""Pipelines: the layers of a model spread over ranks, which work on different microbatches at the same time.

Schedules, sends and receives come from torch.distributed.pipelining. This file adds three things:
- Every microbatch is computed under its own number, in whatever order, so random bits are the same as in one process.
- Weights are quantized once a step.
- Shapes are given. torch would find them by a forward and a backward, which draw random bits and count steps of delayed
  scaling.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hqsweep.errors import UserError
from hqsweep.nn.core.context import current, within
from hqsweep.nn.core.module import WHOLE_ROLES, roles_of
from hqsweep.nn.core.residual import add_branch
from hqsweep.nn.linear_loss import forms_loss
from hqsweep.nn.norm_embedding import check_tokens
from hqsweep.nn.transformer import MoELayer, through
from hqsweep.parallel.data import reshard
from hqsweep.parallel.mesh import axis_of, peers
from hqsweep.parallel.shared.tokens import gains_summed_together
from hqsweep.parallel.shared.vocabulary import cross_entropy, vocabulary_group
from hqsweep.parallel.wire.local import is_spread, local, squared_norms
from hqsweep.torch_private import foreach_norm


class StageOfLayers(nn.Module):
    """Some layers of a GPT as a module.

    The first stage takes tokens int64 [B, T], the others the stream [B, T, D] of the stage before. The last stage
    returns the mean cross entropy with targets, float32 [1]; the others return the stream.

    After n layers with experts, their balances, float32 [n], travel beside the stream. In training the last stage adds
    load_balance times their mean and divides the sum by `share`.
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
        """For each microbatch: the tokens int64 [E] of the experts of each layer that has experts."""
        self.balances: list[Tensor] = []
        """For each microbatch, in the last stage: the mean of the balances of all layers."""

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
            return torch.stack([loss])  # fully_shard asks for a tensor that is no view
        if every:
            balance = torch.cat(every).mean()
            self.balances.append(balance.detach())
            loss = loss + self.load_balance * balance
        return torch.stack([loss / self.share])


class Stage(PipelineStage):
    """A stage that computes each microbatch in its own context. Under fully_shard only the backward of the last
    microbatch sums gradients over ranks."""

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
            except RuntimeError as error:  # torch wraps the error of the layers
                raise error.__cause__ or error from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if self.has_backward and isinstance(self._layers, FSDPModule):
            self._layers.set_requires_gradient_sync(bwd_chunk_id == self.chunks - 1)
        with self._at(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)


class _Plain(nn.Module):
    """The module that torch's schedules see of a stage. It hides fully_shard from them: they would keep weights
    gathered for the whole step, by calls that differ from version to version."""

    def __init__(self, layers: StageOfLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layers(*args, **options)


AXIS = "pp"
TABLE = "embedding.weight"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLosses:
    """The losses of a step, equal on all ranks of the pipeline."""

    shares: Tensor
    """float32 [microbatches]: each microbatch's share of the loss that is minimized."""
    balances: Tensor
    """float32 [microbatches]: the mean of Routing.balance over the layers with experts; 0 without experts."""
    tokens: Tensor
    """int64 [microbatches, layers with experts, E]: the tokens of each expert."""

    @property
    def total(self) -> Tensor:
        """float32 []: the shares, added in order."""
        total = torch.zeros_like(self.shares[0])
        for share in self.shares:
            total += share
        return total


class Pipeline:
    """Spreads a GPT, in place, over the ranks along an axis of the mesh ("pp" or the only one), and trains it there.

    With n ranks and s stages_per_rank there are n * s stages of equal numbers of layers, give or take one. Rank r has
    the stages r, r + n and so on. The first stage has the embedding, the last one the norm and the head. Modules keep
    their names in the whole model. The schedule is 1F1B, interleaved where ranks have several stages.

    Losses and gradients have the bytes of one process that computes the microbatches one after the other. Microbatch j
    of a step under quantization(microbatch=i) draws its random bits as microbatch i + j. Ranks along other axes of the
    mesh share the amaxes of delayed scaling of a stage.

    Call tensor_parallel, if at all, before, and expert_parallel afterwards on the model with the layers that this rank
    keeps. `parts` are the modules of this rank's stages, each of which fully_shard may take, its layers first.

    The loss that is minimized is the mean cross entropy over `copies` ranks with other tokens, plus load_balance times
    the mean balance of layers with experts. A head that is tied to the embedding lies on the first and the last rank,
    and each microbatch adds to both gradients. They are added up at the end of the step; one process adds both of a
    microbatch at a time.

    Raises:
        UserError: for a model that is no GPT; fewer layers than stages; fewer microbatches than ranks; with several
            stages a number of microbatches that ranks do not divide. At a call: for tokens that ranks of "tp" do not
            divide.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        microbatches: int,
        *,
        stages_per_rank: int = 1,
        copies: int = 1,
        load_balance: float = 0.0,
    ) -> None:
        along = axis_of(mesh, AXIS, "Pipeline")
        self.model, self.group, self.ranks, self.microbatches = model, along.get_group(), along.size(), microbatches
        self.stages, self.share, self.load_balance = self.ranks * stages_per_rank, microbatches * copies, load_balance
        _check(model, self.stages)
        if microbatches < self.ranks or (stages_per_rank > 1 and microbatches % self.ranks):
            takes = f"a multiple of {self.ranks}" if stages_per_rank > 1 else f"{self.ranks} or more"
            raise UserError(f"Pipeline: {microbatches} microbatches over {self.ranks} ranks; it takes {takes}")
        self.same_stage = peers(mesh, AXIS)
        self.width, self.dtype = model.embedding.weight.shape[1], model.embedding.weight.dtype
        self.device, layers = model.embedding.weight.device, len(model.layers)
        table = model.embedding.parallel
        self._split = None if table is None else table.split
        self._tokens_over = 1 if self._split is None else table.part.group.size()
        setattr(model, WHOLE_ROLES, roles_of(model))
        self._order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
        self._mixtures = [index for index, layer in enumerate(model.layers) if isinstance(layer, MoELayer)]
        self._experts = len(model.layers[self._mixtures[0]].mlp.router.weight) if self._mixtures else 0
        self._bounds = [layers * index // self.stages for index in range(self.stages + 1)]
        self._place = along.get_local_rank()
        own, tied = range(self._place, self.stages, self.ranks), model.head.weight is model.embedding.weight
        self._shares_table = tied and self.ranks > 1 and self._place in (0, self.ranks - 1)
        self.parts = {i: StageOfLayers(model, self._layers(i), i == 0, i == self.stages - 1) for i in own}
        _keep(model, [layer for i in own for layer in self._layers(i)], own)
        if self._shares_table and self._place:
            model.embedding = _Tied(model.head)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._first, self._training, self._period = 0, True, None

    def _layers(self, stage: int) -> range:
        return range(self._bounds[stage], self._bounds[stage + 1])

    def step(self, tokens: Tensor, targets: Tensor) -> StepLosses:
        """Compute forward and backward of tokens [B, T] with targets [B, T], and return the losses.

        Gradients are added to the parameters of this rank. Every rank gives the same tokens. UserError for a B that the
        microbatches do not divide.
        """
        if len(tokens) % self.microbatches:
            raise UserError(f"Pipeline: a batch of {len(tokens)} sequences for {self.microbatches} microbatches")
        shape = tuple(tokens.shape)
        if shape not in self._schedules:
            self._schedules[shape] = self._schedule((len(tokens) // self.microbatches, shape[1]), self.microbatches)
        before = self._take_gradient() if self._shares_table else None
        shares = self._run(self._schedules[shape], tokens, targets)
        if self._shares_table:
            self._sum_gradients(before)
        balances = [balance for part in self.parts.values() for balance in part.balances]
        return StepLosses(
            shares=self._from_last(shares),
            balances=self._from_last(balances if self._mixtures else [torch.zeros(())] * self.microbatches),
            tokens=self._tokens(),
        )

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """float32 [n]: the mean cross entropy of each of n batches of tokens [n, B, T] with targets. All batches have
        the number of one microbatch."""
        batches, size, length = tokens.shape
        more = -batches % self.ranks if len(self.parts) > 1 else 0  # an interleaved schedule needs a multiple
        tokens, targets = (torch.cat([batch, *[batch[-1:]] * more]).flatten(0, 1) for batch in (tokens, targets))
        schedule = self._schedule((size, length), batches + more, training=False)
        losses = self._run(schedule, tokens, targets, training=False)
        for part in self.parts.values():
            reshard(part)
        return self._from_last(losses, batches + more)[:batches]

    def norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """[]: the 2-norm of the gradients of all ranks. parameters, gradients: this rank's own.

        The norms of single parameters are added in the order of the whole model, as in one process.
        """
        names, spread = {id(p): name for name, p in self.model.named_parameters()}, any(map(is_spread, gradients))
        every = torch.zeros(len(self._order), dtype=torch.float32, device=self.device)
        own = squared_norms(gradients) if spread else torch.stack(foreach_norm(list(gradients))).float()
        every[[self._order[names[id(p)]] for p in parameters]] = own
        if self._shares_table and self._place:
            every[self._order[TABLE]] = 0.0  # the first rank counts it
        dist.all_reduce(every, group=self.group)
        return every.sum().sqrt() if spread else torch.linalg.vector_norm(every)

    def _run(self, schedule: Any, tokens: Tensor, targets: Tensor, *, training: bool = True) -> list[Tensor]:
        """The losses of the microbatches, in order, on the rank with the last stage; [] on other ranks."""
        self._first, self._training, self._period, losses = current().microbatch, training, object(), []
        for part in self.parts.values():
            part.share = self.share if training else None
            part.load_balance = self.load_balance
            part.tokens.clear()
            part.balances.clear()
        inputs = (tokens,) if 0 in self.parts else ()
        last = {"targets": targets} if self.stages - 1 in self.parts else {}
        target = {"target": targets, "losses": losses} if last and training else {}
        outputs = schedule.step(*inputs, **target, **last)
        if training:
            return [loss.detach() for loss in losses]
        return list(outputs.unbind()) if last else []

    def _take_gradient(self) -> Tensor | None:
        """Take away, and return, the tied weight's gradient of earlier steps, which is already a sum over ranks."""
        table = self.model.embedding.weight
        if hasattr(table, "main_grad"):
            raise UserError("Pipeline: a tied head has no main_grad over ranks; give model.tied=false, or plain grads")
        before, table.grad = table.grad, None
        return before

    def _sum_gradients(self, before: Tensor | None) -> None:
        """Add up the gradients that the first and the last rank have of the tied weight. before: the sum of earlier
        steps."""
        own = local(self.model.embedding.weight.grad)
        theirs = torch.empty_like(own)
        other = dist.get_global_rank(self.group, 0 if self._place else self.ranks - 1)
        operations = [(dist.isend, own), (dist.irecv, theirs)]
        for work in dist.batch_isend_irecv([dist.P2POp(op, x, other, self.group) for op, x in operations]):
            work.wait()
        own += theirs
        if before is not None:
            own += local(before)

    def _from_last(self, values: Sequence[Tensor], count: int | None = None) -> Tensor:
        """float32 [count]: the values [] of the rank with the last stage, sent to all ranks."""
        losses = torch.zeros(count or self.microbatches, dtype=torch.float32, device=self.device)
        if self.stages - 1 in self.parts:
            losses = torch.stack(list(values)).to(self.device)
        dist.broadcast(losses, dist.get_global_rank(self.group, (self.stages - 1) % self.ranks), group=self.group)
        return losses

    def _tokens(self) -> Tensor:
        """The tokens of all experts. Each rank has counted the tokens of its own layers."""
        size = (self.microbatches, len(self._mixtures), self._experts)
        counts = torch.zeros(size, dtype=torch.int64, device=self.device)
        for stage, part in self.parts.items():
            own = [self._mixtures.index(layer) for layer in self._layers(stage) if layer in self._mixtures]
            if own:
                counts[:, own] = torch.stack([torch.stack(of_layers) for of_layers in part.tokens])
        if self._mixtures:
            dist.all_reduce(counts, group=self.group)
        return counts

    def _schedule(self, shape: tuple[int, int], microbatches: int, *, training: bool = True) -> Any:
        """torch's schedule for microbatches of tokens of this shape; training=False: forward only."""
        if self._split is not None:
            check_tokens(shape, self._split, self._tokens_over, "Pipeline: ")
        stages = [self._stage(index, part, shape) for index, part in self.parts.items()]
        loss = _loss if training else None
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, microbatches, loss, scale_grads=False)
        kind = Schedule1F1B if training else ScheduleGPipe
        return kind(stages[0], microbatches, loss, scale_grads=False)

    def _stage(self, index: int, part: StageOfLayers, shape: tuple[int, int]) -> Stage:
        inputs = self._stream(self._bounds[index], shape)
        if index == 0:
            inputs = (torch.empty(shape, dtype=torch.int64, device="meta"),)
        outputs = self._stream(self._bounds[index + 1], shape)
        if index == self.stages - 1:
            outputs = (torch.empty(1, device="meta", requires_grad=True),)
        options = {"input_args": inputs, "output_args": outputs, "group": self.group}
        return Stage(part, index, self.stages, self.device, **options, at=self._at)

    def _stream(self, layer: int, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """The tensors, on the meta device, that enter the stage whose first layer is `layer`."""
        own = [size // self._tokens_over if axis == self._split else size for axis, size in enumerate(shape)]
        stream = torch.empty(*own, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        balances = sum(index < layer for index in self._mixtures)
        return (stream, torch.empty(balances, device="meta", requires_grad=True)) if balances else (stream,)

    def _at(self, microbatch: int) -> AbstractContextManager:
        """The context in which a microbatch of the call is computed, forward and backward."""
        number = self._first + microbatch if self._training else self._first
        kept = {"cache_weights": True, "period": self._period}  # no weight changes within one call
        return within(replace(current(), microbatch=number, amax_group=self.same_stage, **kept))


class _Tied(nn.Module):
    """The embedding's substitute in the last stage, where the head is tied to it: a module with the weight under its
    name.

    Both modules share one dictionary of parameters, so that the parameters that fully_shard gives the head are here,
    too.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._parameters = head._parameters
        self.register_state_dict_pre_hook(lambda *_: head.state_dict())  # it makes fully_shard go back to shards


def _loss(share: Tensor, targets: Tensor) -> Tensor:
    """The loss of a microbatch, which the last stage has computed already in the microbatch's context."""
    return share.sum()


def _check(model: nn.Module, stages: int) -> None:
    missing = [name for name in ("embedding", "layers", "norm", "head") if not hasattr(model, name)]
    if missing:
        raise UserError(f"Pipeline: {type(model).__name__} has no {missing[0]}; it takes hqsweep's own GPT")
    if len(model.layers) < stages:
        raise UserError(f"Pipeline: {stages} stages of {len(model.layers)} layers; lower pp, or stages_per_rank")


def _keep(model: nn.Module, layers: list[int], stages: range) -> None:
    """Delete layers, embedding, norm and head that other ranks own from the model."""
    for name in {name for name, _ in model.layers.named_children()} - set(map(str, layers)):
        delattr(model.layers, name)
    if 0 not in stages:
        model.embedding = None
    if stages[-1] != stages.stop - 1:
        model.norm = model.head = None
