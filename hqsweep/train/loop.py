"""The training loop, to be read from top to bottom: steps, samples of error statistics, evaluation, checkpoints.

A step depends only on the data, the config and the state in the checkpoint, so that a resumed run equals an
uninterrupted one bit for bit on the same device, threads and instruction set.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hqsweep.checkpoints.foreign.checkpoint import Checkpoint
from hqsweep.checkpoints.foreign.load import Loaded, load_checkpoint
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.parallel import ParallelConfig
from hqsweep.errors import UserError
from hqsweep.nn import Probe, quantization, set_recipe
from hqsweep.nn.core.context import unwritten
from hqsweep.nn.layers.offload import ActivationOffload
from hqsweep.nn.layers.saved_memory import SavedBytes
from hqsweep.ops.quantize.nonfinite import counted
from hqsweep.parallel.data import in_order, reshard, shared_out, synchronized, whole
from hqsweep.parallel.mesh import Ranks
from hqsweep.parallel.parallelize import spread, spread_layers
from hqsweep.parallel.samples import captured_of_all, rows_of_all
from hqsweep.parallel.shared.expert_room import check_room
from hqsweep.parallel.shared.held_experts import share_amaxes
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.stages import Stage, stages
from hqsweep.train.adapter import Balance, Losses
from hqsweep.train.build import adapted, make_optimizer
from hqsweep.train.data import Dataset
from hqsweep.train.fork import perturb as perturb_state
from hqsweep.train.fork import shapes_of, start_from, start_from_folder, take_parts
from hqsweep.train.nonfinite import Nonfinite
from hqsweep.train.pace import learning_rate
from hqsweep.train.step import At, StepRunner


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of one update; `step` counts finished updates, from 1."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    stats: list[dict] = field(default_factory=list)
    """Error statistics of all microbatches and ranks, on the first rank."""
    captured: dict[str, Tensor] = field(default_factory=dict)
    """The operands of linears by LAYER.TENSOR, at the step stats.capture_at."""
    loss: float | None = None
    """The mean training loss since the last log, on steps that log."""


class Trainer:
    """The model, the optimizer and the position of one run.

    The recipe of a step depends on the step alone, so that a resumed run changes recipes where an uninterrupted one
    does. UserError when the recipe's schedule does not fit the number of steps.
    """

    def __init__(
        self,
        config: ConvergenceConfig,
        dataset: Dataset,
        recipe: AnyRecipe,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        config.train.check_compile(on_gpu=device.type == "cuda")
        self.config, self.dataset, self.device, self.ranks = config, dataset, device, ranks
        self.kernels = config.train.compile != "off"
        self.stages = stages(recipe, config.own_steps, config.start)
        self.stage = self.stages[0]
        self.adapter = adapted(config, dataset.vocab_size, self.stage.recipe, device)
        self.model = self.adapter.model
        self.shapes = shapes_of(self.model)
        self.pipeline = None
        if ranks is not None:
            sequences = config.microbatch // ranks.data_size
            if ranks.dims.pp > 1:
                numbers = (sequences, config.train.microbatches, config.model.load_balance)
                self.pipeline = spread_layers(self.model, ranks, *numbers)
            else:
                spread(self.model, ranks, sequences, self.adapter.methods, self.adapter.autocast)
        self.optimizer = make_optimizer(self.adapter, config.train)
        self.saving = ActivationOffload(self.model).saving if config.train.offload else nullcontext
        self.saved = SavedBytes(self.model)
        why_eager = self.adapter.why_eager or _why_eager(config.train.parallel)
        self.runner = StepRunner(config.train, self.model, device, why_eager)
        self.nonfinite = Nonfinite(device, ranks)
        self.step = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_count = 0
        self.val_loss: float | None = None
        self._sampled: dict[str, Any] = {}
        self.trunk: dict[str, Any] = {}
        """The entries of a fork's manifest about the state that it began with: trunk_val_loss and trunk_sha256."""

    def steps(self, last: int | None = None) -> Iterator[Step]:
        """Train to the end, or to the step `last`; yields one Step for each update."""
        while self.step < (last or self.config.train.steps):
            with counted():
                done = self._advance()
            yield done

    def _advance(self) -> Step:
        train = self.config.train
        self.step += 1
        self._follow_schedule()
        probe = self._probe()
        fork = self.config.fork
        lr = train.lr * fork.rate(self.step) if fork else learning_rate(train, self.step)
        self.optimizer.set_lr(lr)
        batch = self._own_part(self._batch("train", self.step - 1))
        norm, balance, *tokens = self.runner.run(self._update, batch, At(step=self.step, probe=probe))
        self.loss_count += 1
        return self._report(norm, lr, Balance(loss=balance, tokens=tokens), probe)

    def _update(self, inputs: Tensor, targets: Tensor, at: At) -> list[Tensor]:
        """One whole update on inputs and targets [B, T]: the norm of its gradients, the loss of the balance, and the
        tokens of each expert of the layers that have some."""
        loss, balance = self._forward_backward(inputs, targets, at)
        of_stages = self.pipeline and self.pipeline.norm
        norm = self.optimizer.clip_and_step(self.config.train.clip, self.model.parameters(), of_stages)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.double()
        self.nonfinite.end_step(at.step, at.counter, whole(norm))
        if at.probe is not None:  # before what it has seen lies in memory that graphs write over
            self._sampled = self._probed(at.probe)
            at.probe.samples.clear()
        return [whole(norm), balance.loss, *balance.tokens]

    def _follow_schedule(self) -> None:
        """Give the model the recipe of this step, if that differs from the one before."""
        stage = stage_at(self.stages, self.step)
        if stage is not self.stage:
            set_recipe(self.model, stage.recipe)
            self.stage = stage
            self.runner.forget()

    def _report(self, norm: Tensor, lr: float, balance: Balance, probe: Probe | None) -> Step:
        train, metrics, mean = self.config.train, {}, None
        last = self.step == train.steps
        own, fork = self.step - self.config.start, self.config.fork
        if last or own % train.log_every == 0 or (fork and self.step == fork.constant_end):
            mean = self._checked((self.loss_sum / self.loss_count).item())
            metrics = {"train_loss": mean, "grad_norm": norm.item(), "lr": lr}
            if self.adapter.has_aux:
                metrics["aux_loss"] = balance.loss.item()
            if balance.tokens:
                metrics["expert_load_max"] = balance.greatest_load()
            self.nonfinite.read()
            metrics |= self.nonfinite.metrics()
            self.loss_sum.zero_()
            self.loss_count = 0
        looked = fork is not None and fork.looks_at(self.step)
        if last or looked or own % train.eval_every == 0 or self.step in self.kept:
            metrics["val_loss"] = self.val_loss = self._checked(self.evaluate())
        if len(self.stages) > 1 and self.step == self.stage.first_step:
            metrics["recipe_stage"] = float(self.stages.index(self.stage))
        return Step(step=self.step, metrics=metrics, loss=mean, **(self._sampled if probe else {}))

    def _checked(self, loss: float) -> float:
        """The loss; UserError where it is none since rows of experts found no room."""
        if not math.isfinite(loss):
            check_room(self.model, "train.parallel.")
        return loss

    def _probed(self, probe: Probe) -> dict[str, Any]:
        """The rows, and the operands, of a sampled step, of all ranks."""
        if self.ranks is None:
            return {"stats": probe.rows, "captured": probe.captured}
        captured = captured_of_all(probe, self.ranks) if probe.capture else {}
        return {"stats": rows_of_all(probe, self.ranks), "captured": captured}

    def _probe(self) -> Probe | None:
        stats = self.config.stats
        capture = self.step == stats.capture_at
        if not capture and (not stats.every or (self.step - self.config.start) % stats.every):
            return None
        share_amaxes(self.model)
        masters = whole(self.adapter.originals(self.optimizer.master_param))
        return Probe(self.step, gemms=stats.gemm, originals=masters, capture=capture)

    def _forward_backward(self, inputs: Tensor, targets: Tensor, at: At) -> tuple[Tensor, Balance]:
        """The mean of what is minimized over the step's batch, whose gradients are accumulated over its microbatches,
        and the use of the experts."""
        parts = self.config.train.microbatches
        copies, first = (self.ranks.data_size, self.ranks.data_rank * parts) if self.ranks else (1, 0)
        losses_of, balances = [], []
        call = {"seed": self.config.seed, "step": at.step, "counter": at.counter, "probe": at.probe}
        read_once = parts > 1 or self.config.recipe.gemm == "native"  # codes are half as large as exact operands
        call |= {"cache_weights": read_once, "kernels": self.kernels}
        if self.pipeline is not None:
            with quantization(microbatch=first, **call):
                step_losses = self.pipeline.step(inputs, targets)
            balances = [
                Balance(loss=b, tokens=list(t)) for b, t in zip(step_losses.balances, step_losses.tokens, strict=True)
            ]
            return self._total(list(step_losses.shares)), Balance.of(balances, self._of_ranks)
        period = object()
        for index, part in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            with (
                quantization(microbatch=first + index, **call),
                unwritten(period),
                synchronized(self.model, last=index == parts - 1),
            ):
                self.adapter.begin((self.config.seed, at.step, first + index))
                losses = self._losses(*part)
                loss = losses.minimized / (parts * copies)
                loss.backward()
            losses_of.append(loss.detach())
            balances.append(losses.balance)
        return self._total(losses_of), Balance.of(balances, self._of_ranks)

    def _total(self, parts: list[Tensor]) -> Tensor:
        """The sum of the shares of a loss, in order of the microbatches of all ranks."""
        shares = torch.stack(parts)
        total = torch.zeros((), device=self.device)
        for share in self._of_ranks(shares).flatten():
            total += share
        return total

    def _of_ranks(self, value: Tensor) -> Tensor:
        """value [...] of this rank -> [ranks, ...] of all ranks that have other sequences."""
        return value[None] if self.ranks is None else in_order(value, self.ranks)

    def _batch(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets [B, T] of a batch, on the CPU."""
        return self.dataset.batch(split, self.config.seed, index, self.config.train.batch, self.config.train.context)

    def _own_part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's sequences of a step's batch."""
        if self.ranks is None:
            return batch
        return tuple(tokens.chunk(self.ranks.data_size)[self.ranks.data_rank] for tokens in batch)

    def _losses(self, inputs: Tensor, targets: Tensor) -> Losses:
        train = self.config.train
        apart = train.offload or train.recompute != "none" or self.ranks is not None
        count = torch.is_grad_enabled() and not (self.saved.nbytes or apart)
        return self.adapter.losses(inputs, targets, self.saved.counting if count else self.saving)

    def evaluate(self) -> float:
        """The mean cross entropy in nats a token over the validation batches, which are the same for every run and
        step.

        The model is as the next step's forward would see it: after the update, under the scales that it leaves.
        """
        batches = self.config.train.eval_batches
        copies, first = (self.ranks.data_size, self.ranks.data_rank) if self.ranks else (1, 0)
        rounds = -(-batches // copies)  # ranks without a batch of their own in the last one repeat another's
        own = (self._batch("val", min(first + copies * i, batches - 1)) for i in range(rounds))
        inputs, targets = zip(*own, strict=True)
        return self.runner.evaluate(self._measure, (torch.stack(inputs), torch.stack(targets)), self.step + 1)

    @torch.no_grad()
    def _measure(self, inputs: Tensor, targets: Tensor, at: At) -> list[Tensor]:
        """The mean loss over batches of inputs and targets [batches, B, T], float64."""
        call = {"seed": self.config.seed, "step": at.step, "counter": at.counter}
        with (
            self.adapter.evaluating(),
            quantization(**call, cache_weights=True, kernels=self.kernels),
            unwritten(object()),
        ):
            if self.pipeline is None:
                batches = zip(inputs, targets, strict=True)
                every = torch.stack([self._losses(*batch).cross_entropy.double() for batch in batches])
                reshard(self.model)
            else:
                every = self.pipeline.evaluate(inputs, targets).double()
        if self.ranks is not None:
            every = in_order(every, self.ranks).t().flatten()[: self.config.train.eval_batches]
        return [every.mean()]

    @property
    def kept(self) -> Collection[int]:
        """The steps whose checkpoints are kept: the points of a trunk."""
        return self.config.points

    def state(self) -> dict:
        """Everything that training goes on from; over several ranks whole tensors, on each of them. A collective."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= self.adapter.state() | self.position()
        return state if self.ranks is None else whole(state)

    def load_weights(self, checkpoint: Checkpoint) -> Loaded:
        """Take the weights of another program's checkpoint, and the moments where it has some. Each of several ranks
        reads all of it, and gives the model its part."""
        if self.ranks is None:
            model, optimizer = self.model, self.optimizer
        else:
            plain = adapted(self.config, self.dataset.vocab_size, self.stage.recipe, torch.device("cpu"))
            model, optimizer = plain.model, make_optimizer(plain, self.config.train)
        loaded = load_checkpoint(checkpoint, model, optimizer)
        if self.ranks is not None:
            take_parts(self.model, self.optimizer, model, optimizer)
        self.runner.forget()
        return loaded

    def fork_from(self, trunk: dict | Path) -> None:
        """Begin as a fork of a Trainer in any recipe: from its state, or the folder that its ranks have written. A
        collective."""
        fork, seed = self.config.fork, self.config.seed
        if isinstance(trunk, Path):
            state = start_from_folder(self.model, self.optimizer, trunk)
            self.adapter.check(state)
        else:
            if self.pipeline is not None:
                raise UserError(
                    "fork.trunk: it is the state of one process, and ranks with layers of their own (train.parallel.pp)"
                    " go on from a folder that ranks wrote; give another, or pp=1"
                )
            state = self._shared_out(trunk)
            self.adapter.load_state(state)
            start_from(self.model, self.optimizer, state)
        if fork.noise:
            perturb_state(self.model, self.optimizer, fork.noise, (seed, fork.start), self.shapes)
        self.step = state["step"]
        self.trunk = {"trunk_val_loss": state.get("val_loss")}
        self.runner.forget()

    def _shared_out(self, state: dict) -> dict:
        """This rank's parts of a state of whole tensors."""
        return state if self.ranks is None else state | shared_out(self.model, self.optimizer, state)

    def load_state(self, state: dict) -> None:
        state = self._shared_out(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.adapter.load_state(state)
        self.load_position(state)

    def position(self) -> dict[str, Any]:
        """What state() has of the loop itself, copied, as the next step changes it."""
        check_room(self.model, "train.parallel.")
        measured = {"val_loss": self.val_loss} if self.step in self.kept else {}
        losses = {"loss_sum": self.loss_sum.clone(), "loss_count": self.loss_count, "last_val_loss": self.val_loss}
        met = self.nonfinite.state()
        return {"trunk": self.trunk, "step": self.step, **losses, **measured, **met, **self.adapter.facts}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load this position; model and optimizer are loaded already."""
        self.adapter.check(state)
        self.step, self.loss_count, self.trunk = state["step"], state["loss_count"], state["trunk"]
        self.loss_sum, self.val_loss = state["loss_sum"].to(self.device), state.get("last_val_loss")
        self.nonfinite.load(state)
        self.runner.forget()


def _why_eager(dims: ParallelConfig) -> str | None:
    """Why steps over these ranks cannot be a graph, if they cannot."""
    if dims.pp > 1:
        return "its stages send tensors to each other"
    if dims.ep > 1 and dims.expert_room is None:
        return "the host waits for the numbers of tokens that come to its experts (train.parallel.expert_room is null)"
    return None


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of a step, counted from 1."""
    return [stage for stage in stages if stage.first_step <= step][-1]
