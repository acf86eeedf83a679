"""The training loop, to be read from top to bottom: steps, samples of error statistics, evaluation, checkpoints.

A step depends only on the data, the config and the state in the checkpoint. So a resumed run equals an uninterrupted
one bit for bit, on the same device, threads and instruction set. Everything that needs other ranks goes through `ranks`
and `microbatches`, which also serve one rank alone.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hqsweep.checkpoints.checkpoint import Checkpoint
from hqsweep.checkpoints.weights import Loaded, load_checkpoint
from hqsweep.config.job import ConvergenceConfig
from hqsweep.nn import Probe, set_recipe
from hqsweep.ops.quantize.nonfinite import counted
from hqsweep.parallel.data import captured_of_all, rows_of_all
from hqsweep.parallel.mesh import Ranks, Trained
from hqsweep.parallel.shared.expert_room import check_room
from hqsweep.parallel.shared.held import share_amaxes
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.stages import Stage, stages
from hqsweep.train.adapter import Balance
from hqsweep.train.build import adapted, learning_rate, make_optimizer
from hqsweep.train.data import Dataset
from hqsweep.train.fork import check_layers, shapes_of, start_from, start_from_folder, take_parts
from hqsweep.train.fork import perturb as perturb_state
from hqsweep.train.microbatches import share_out
from hqsweep.train.nonfinite import Nonfinite
from hqsweep.train.step import At, StepRunner


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of one update. `step` counts finished updates, from 1."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    stats: list[dict] = field(default_factory=list)
    """Error statistics of all microbatches and ranks, on the first rank."""
    what_if: list[dict] = field(default_factory=list)
    """The same for the formats of stats.what_if."""
    captured: dict[str, Tensor] = field(default_factory=dict)
    """At the step stats.capture_at, on the first rank: the operands of linears by LAYER.TENSOR."""
    loss: float | None = None
    """On steps that log: the mean training loss since the last log."""


class Trainer:
    """The model, the optimizer and the position of one run. ranks: the ranks that train it; default: this process
    alone.

    The recipe of a step depends on the step alone, so that a resumed run changes recipes at the same steps. UserError
    where the recipe's schedule does not fit the number of steps.
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
        self.config, self.dataset, self.device = config, dataset, device
        self.ranks = ranks or Ranks.alone(device)
        self.stages = stages(recipe, config.own_steps, config.start)
        self.stage = self.stages[0]
        self.adapter = adapted(config, dataset.vocab_size, self.stage.recipe, device)
        self.model = self.adapter.model
        self.shapes = shapes_of(self.model)
        self.microbatches = share_out(config, self.adapter, self.ranks)
        self.optimizer = make_optimizer(self.adapter, config.train)
        self.runner = StepRunner(config.train, self.model, device, self.microbatches.why_eager)
        self.nonfinite = Nonfinite(device, self.ranks)
        self.step = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_count = 0
        self.val_loss: float | None = None
        self._sampled: dict[str, Any] = {}
        self.trunk: dict[str, Any] = {}
        """A fork's manifest entries about its start: trunk_val_loss and trunk_sha256."""

    def steps(self, last: int | None = None) -> Iterator[Step]:
        """Train to the end, or to the step `last`. Yields one Step for each update."""
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
        """Do one whole update on inputs and targets [B, T].

        Returns the norm of the gradients, the loss of the balance, and the tokens of each expert for each layer with
        experts.
        """
        compiled = self.adapter.compiled
        if at.probe is not None and compiled is not None and compiled.on:  # its graphs cannot be looked into
            with compiled.plain():
                self.microbatches.step(inputs, targets, at)
            self.optimizer.zero_grad(set_to_none=True)
            loss, balance = self.microbatches.step(inputs, targets, replace(at, probe=None))
        else:
            loss, balance = self.microbatches.step(inputs, targets, at)
        norm_of_all = self.microbatches.norm
        norm = self.optimizer.clip_and_step(self.config.train.clip, self.model.parameters(), norm_of_all)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.double()
        norm = self.ranks.whole(norm)
        self.nonfinite.end_step(at.step, at.counter, norm)
        if at.probe is not None:  # at once, because later graphs overwrite the samples
            self._sampled = self._probed(at.probe)
            at.probe.samples.clear()
        return [norm, balance.loss, *balance.tokens]

    def _follow_schedule(self) -> None:
        """Give the model the recipe of this step, if it differs from the step before."""
        stage = stage_at(self.stages, self.step)
        if stage is not self.stage:
            set_recipe(self.model, stage.recipe)
            self.stage = stage
            if self.adapter.compiled is not None:
                self.adapter.compiled.begin()
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
        """The loss. UserError where it is not finite because rows of experts found no room."""
        if not math.isfinite(loss):
            check_room(self.model, "train.parallel.")
        return loss

    def _probed(self, probe: Probe) -> dict[str, Any]:
        """The rows and the operands of a sampled step, of all ranks."""
        captured = captured_of_all(probe, self.ranks) if probe.capture else {}
        stats, what_if = rows_of_all(probe, self.ranks)
        return {"stats": stats, "what_if": what_if, "captured": captured}

    def _probe(self) -> Probe | None:
        stats = self.config.stats
        capture = self.step == stats.capture_at
        if not capture and (not stats.every or (self.step - self.config.start) % stats.every):
            return None
        share_amaxes(self.model)
        masters = self.ranks.whole(self.adapter.originals(self.optimizer.master_param))
        return Probe(self.step, gemms=stats.gemm, originals=masters, capture=capture, what_if=stats.what_if)

    def _batch(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets [B, T] of a batch, on the CPU."""
        return self.dataset.batch(split, self.config.seed, index, self.config.train.batch, self.config.train.context)

    def _own_part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's sequences of a step's batch."""
        return tuple(tokens.chunk(self.ranks.data_size)[self.ranks.data_rank] for tokens in batch)

    def evaluate(self) -> float:
        """The mean cross entropy, in nats a token, over the validation batches. They are the same for every run and
        step.

        The model is as the next step's forward would see it: after the update, under the scales that it leaves.
        """
        batches = self.config.train.eval_batches
        copies, first = self.ranks.data_size, self.ranks.data_rank
        rounds = -(-batches // copies)  # in the last round some ranks repeat a batch
        own = (self._batch("val", min(first + copies * i, batches - 1)) for i in range(rounds))
        inputs, targets = zip(*own, strict=True)
        return self.runner.evaluate(self._measure, (torch.stack(inputs), torch.stack(targets)), self.step + 1)

    @torch.no_grad()
    def _measure(self, inputs: Tensor, targets: Tensor, at: At) -> list[Tensor]:
        """The mean loss over batches of inputs and targets [batches, B, T], as one float64."""
        every = self.ranks.in_order(self.microbatches.evaluate(inputs, targets, at))
        return [every.t().flatten()[: self.config.train.eval_batches].mean()]

    @property
    def kept(self) -> Collection[int]:
        """The steps whose checkpoints are kept: the fork points of a trunk."""
        return self.config.points

    def state(self) -> dict:
        """The whole state of the training, with whole tensors on every rank. A collective."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= self.adapter.state() | self.position()
        return self.ranks.whole(state)

    def load_weights(self, checkpoint: Checkpoint) -> Loaded:
        """Take the weights of another program's checkpoint, and its moments if it has any.

        Each rank reads the whole checkpoint and takes its part.
        """
        model, optimizer = self.ranks.whole_model((self.model, self.optimizer), self._on_cpu)
        loaded = load_checkpoint(checkpoint, model, optimizer)
        take_parts(self.model, self.optimizer, model, optimizer)
        self.runner.forget()
        return loaded

    def _on_cpu(self) -> Trained:
        """The whole model in this stage's recipe on the CPU, and its optimizer."""
        plain = adapted(self.config, self.dataset.vocab_size, self.stage.recipe, torch.device("cpu"))
        return plain.model, make_optimizer(plain, self.config.train)

    def fork_from(self, trunk: dict | Path) -> None:
        """Begin as a fork of a Trainer in any recipe. A collective.

        trunk: the state of a trunk in one process, or the folder that a trunk's ranks have written.
        """
        fork, seed = self.config.fork, self.config.seed
        if isinstance(trunk, Path):
            state = start_from_folder(self.model, self.optimizer, trunk)
            self.adapter.check(state)
        else:
            check_layers(self.config.train.parallel)
            state = self.ranks.parts_of(trunk, self.model, self.optimizer)
            self.adapter.load_state(state)
            start_from(self.model, self.optimizer, state)
        if fork.noise:
            perturb_state(self.model, self.optimizer, fork.noise, (seed, fork.start), self.shapes)
        self.step = state["step"]
        self.trunk = {"trunk_val_loss": state.get("val_loss")}
        self.runner.forget()

    def load_state(self, state: dict) -> None:
        state = self.ranks.parts_of(state, self.model, self.optimizer)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.adapter.load_state(state)
        self.load_position(state)

    def position(self) -> dict[str, Any]:
        """The part of state() that belongs to the loop. Tensors are copied, because the next step changes them."""
        check_room(self.model, "train.parallel.")
        measured = {"val_loss": self.val_loss} if self.step in self.kept else {}
        losses = {"loss_sum": self.loss_sum.clone(), "loss_count": self.loss_count, "last_val_loss": self.val_loss}
        met = self.nonfinite.state()
        return {"trunk": self.trunk, "step": self.step, **losses, **measured, **met, **self.adapter.facts}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load this position, after model and optimizer are loaded."""
        self.adapter.check(state)
        self.step, self.loss_count, self.trunk = state["step"], state["loss_count"], state["trunk"]
        self.loss_sum, self.val_loss = state["loss_sum"].to(self.device), state.get("last_val_loss")
        self.nonfinite.load(state)
        self.runner.forget()


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of a step, counted from 1."""
    return [stage for stage in stages if stage.first_step <= step][-1]
