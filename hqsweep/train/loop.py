"""The training loop, to be read from top to bottom: steps, samples of error statistics, evaluation, checkpoints.

Everything that a step depends on is the data, the config and the state in the checkpoint, so that a resumed run
equals an uninterrupted one bit for bit on the same device, threads and instruction set.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.config.train import TrainConfig
from hqsweep.nn import Probe, quantization, quantized_model_init, set_recipe
from hqsweep.nn.offload import ActivationOffload
from hqsweep.nn.saved import SavedBytes
from hqsweep.optim import FusedAdam
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.stages import Stage, stages
from hqsweep.train.adapter import Balance, Losses, ModelAdapter
from hqsweep.train.data import Dataset
from hqsweep.train.fork import perturb as perturb_state
from hqsweep.train.fork import start_from
from hqsweep.train.model import GPT, GPTAdapter
from hqsweep.train.step import At, StepRunner

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one call of the loop's body produced; `step` counts finished updates, from 1."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    stats: list[dict] = field(default_factory=list)
    captured: dict[str, Tensor] = field(default_factory=dict)
    """Operands of linears by LAYER.TENSOR, at the step stats.capture_at."""
    loss: float | None = None
    """Mean training loss since the last log, on steps that log."""


class Trainer:
    """Model, optimizer and position of one run.

    The recipe of a step depends on the step alone, so that a resumed run changes recipes where an uninterrupted one
    does. UserError when the recipe's schedule does not fit the number of steps.
    """

    def __init__(self, config: ConvergenceConfig, dataset: Dataset, recipe: AnyRecipe, device: torch.device) -> None:
        config.train.check_compile(on_gpu=device.type == "cuda")
        self.config, self.dataset, self.device = config, dataset, device
        self.kernels = config.train.compile != "off"
        self.stages = stages(recipe, config.own_steps, config.start)
        self.stage = self.stages[0]
        self.adapter = adapted(config, dataset.vocab_size, self.stage.recipe, device)
        self.model = self.adapter.model
        self.optimizer = make_optimizer(self.adapter, config.train)
        self.saving = ActivationOffload(self.model).saving if config.train.offload else nullcontext
        self.saved = SavedBytes(self.model)
        self.runner = StepRunner(config.train, self.model, device, self.adapter.why_eager)
        self.step = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_count = 0
        self.val_loss: float | None = None
        self.trunk: dict[str, Any] = {}
        """For the manifest of a fork: trunk_val_loss and trunk_sha256, of the state that it began with."""

    def steps(self, last: int | None = None) -> Iterator[Step]:
        """Train to the end, or to the step `last`; one Step an update."""
        while self.step < (last or self.config.train.steps):
            yield self._advance()

    def _advance(self) -> Step:
        train = self.config.train
        self.step += 1
        self._follow_schedule()
        probe = self._probe()
        fork = self.config.fork
        lr = train.lr * fork.rate(self.step) if fork else learning_rate(train, self.step)
        self.optimizer.set_lr(lr)
        batch = self._batch("train", self.step - 1)
        norm, balance, *tokens = self.runner.run(self._update, batch, At(step=self.step, probe=probe))
        self.loss_count += 1
        return self._report(norm, lr, Balance(loss=balance, tokens=tokens), probe)

    def _update(self, inputs: Tensor, targets: Tensor, at: At) -> list[Tensor]:
        """One whole update on inputs and targets [B, T]: the norm of its gradients, the loss of the balance, and the
        tokens of each expert of the layers that have some."""
        loss, balance = self._forward_backward(inputs, targets, at)
        norm = self.optimizer.clip_and_step(self.config.train.clip, self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.double()
        return [norm, balance.loss, *balance.tokens]

    def _follow_schedule(self) -> None:
        """Give the model the recipe of this step, if it is another one."""
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
            mean = (self.loss_sum / self.loss_count).item()
            metrics = {"train_loss": mean, "grad_norm": norm.item(), "lr": lr}
            if self.adapter.has_aux:
                metrics["aux_loss"] = balance.loss.item()
            if balance.tokens:
                metrics["expert_load_max"] = balance.greatest_load()
            self.loss_sum.zero_()
            self.loss_count = 0
        looked = fork is not None and fork.looks_at(self.step)
        if last or looked or own % train.eval_every == 0 or self.step in self.kept:
            metrics["val_loss"] = self.val_loss = self.evaluate()
        if len(self.stages) > 1 and self.step == self.stage.first_step:
            metrics["recipe_stage"] = float(self.stages.index(self.stage))
        probed = {"stats": probe.rows, "captured": probe.captured} if probe else {}
        return Step(step=self.step, metrics=metrics, loss=mean, **probed)

    def _probe(self) -> Probe | None:
        stats = self.config.stats
        capture = self.step == stats.capture_at
        if not capture and (not stats.every or (self.step - self.config.start) % stats.every):
            return None
        masters = self.adapter.originals(self.optimizer.master_param)
        return Probe(self.step, gemms=stats.gemm, originals=masters, capture=capture)

    def _forward_backward(self, inputs: Tensor, targets: Tensor, at: At) -> tuple[Tensor, Balance]:
        """The mean of what is minimized over the step's batch, whose gradients are accumulated over its microbatches,
        and the use of the experts."""
        parts = self.config.train.microbatches
        total, balances = torch.zeros((), device=self.device), []
        call = {"seed": self.config.seed, "step": at.step, "counter": at.counter, "probe": at.probe}
        call |= {"cache_weights": parts > 1, "kernels": self.kernels}
        for index, part in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            with quantization(microbatch=index, **call):
                self.adapter.begin((self.config.seed, at.step, index))
                losses = self._losses(*part)
                loss = losses.minimized / parts
                loss.backward()
            total += loss.detach()
            balances.append(losses.balance)
        return total, Balance.of(balances)

    def _batch(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] on the CPU."""
        return self.dataset.batch(split, self.config.seed, index, self.config.train.batch, self.config.train.context)

    def _losses(self, inputs: Tensor, targets: Tensor) -> Losses:
        train = self.config.train
        count = torch.is_grad_enabled() and not (self.saved.nbytes or train.offload or train.recompute != "none")
        return self.adapter.losses(inputs, targets, self.saved.counting if count else self.saving)

    def evaluate(self) -> float:
        """Mean cross entropy in nats a token over the validation batches, which are the same for every run and step.

        The model is what the next step's forward would see: after the update, under the scales that it leaves.
        """
        inputs, targets = zip(*(self._batch("val", i) for i in range(self.config.train.eval_batches)), strict=True)
        return self.runner.evaluate(self._measure, (torch.stack(inputs), torch.stack(targets)), self.step + 1)

    @torch.no_grad()
    def _measure(self, inputs: Tensor, targets: Tensor, at: At) -> list[Tensor]:
        """The mean loss over batches of inputs and targets [batches, B, T], float64."""
        call = {"seed": self.config.seed, "step": at.step, "counter": at.counter}
        with self.adapter.evaluating(), quantization(**call, cache_weights=True, kernels=self.kernels):
            losses = [self._losses(*batch).cross_entropy.double() for batch in zip(inputs, targets, strict=True)]
        return [torch.stack(losses).mean()]

    @property
    def kept(self) -> Collection[int]:
        """Steps whose checkpoints are kept: the points of a trunk."""
        return self.config.points

    def state(self) -> dict:
        measured = {"val_loss": self.val_loss} if self.step in self.kept else {}
        return (
            measured
            | self.adapter.state()
            | {
                "trunk": self.trunk,
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loss_sum": self.loss_sum,
                "loss_count": self.loss_count,
            }
        )

    def fork_from(self, state: dict) -> None:
        """Begin as a fork of a Trainer in any recipe, whose state it is."""
        fork, seed = self.config.fork, self.config.seed
        self.adapter.load_state(state)
        start_from(self.model, self.optimizer, state)
        if fork.noise:
            perturb_state(self.model, self.optimizer, fork.noise, (seed, fork.start))
        self.step = state["step"]
        self.trunk = {"trunk_val_loss": state.get("val_loss")}
        self.runner.forget()

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.adapter.load_state(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss_count, self.trunk = state["step"], state["loss_count"], state["trunk"]
        self.loss_sum = state["loss_sum"].to(self.device)
        self.runner.forget()


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of a step, counted from 1."""
    return [stage for stage in stages if stage.first_step <= step][-1]


def adapted(config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe, device: torch.device) -> ModelAdapter:
    """The config's model on the device, in a recipe. UserError where a user's own model cannot be had."""
    if isinstance(config.model, ModelConfig):
        return GPTAdapter(build_model(config, vocab_size, recipe).to(device), config.model)
    from hqsweep.train.user_model import user_adapter  # which a run of the GPT need not wait for

    return user_adapter(config, vocab_size, recipe, device, DTYPES[config.train.dtype])


def build_model(config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe) -> GPT:
    """The model with weights that depend on the seed alone; the caller's random state is left as it was.

    With model.quantized_weights they start from the same values, and training gives the same bytes: what a weight is
    quantized from at every use without it is the master that it is quantized from once a step with it. (But +sr on
    weights draws other bits.)
    """
    held = quantized_model_init(enabled=config.model.quantized_weights, preserve_high_precision_init_val=True)
    with torch.random.fork_rng(devices=[]), quantization(seed=config.seed), held:
        torch.manual_seed(config.seed)
        model = GPT(config.model, vocab_size, recipe, DTYPES[config.train.dtype], config.train.recompute)
        if config.model.init_noise:
            perturb(model, config.model.init_noise)
        return model


@torch.no_grad()
def perturb(model: GPT, noise: float) -> None:
    """Multiply every parameter by 1 + noise * eps, eps ~ N(0, 1) from torch's generator, whose next numbers the initial
    weights do not hold. At noise = 0.01 it is a harmless change of the size of quantization noise."""
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape))


def make_optimizer(adapter: ModelAdapter, train: TrainConfig) -> FusedAdam:
    """AdamW, on FP32 masters where weights are quantized; what decays, the adapter says."""
    decayed, parameters = {id(weight) for weight in adapter.decayed()}, list(adapter.model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=1e-8)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Warm-up, stable, decay (WSD): linear up over `warmup`, linear down to min_lr_fraction over the last `decay`."""
    warmup, decay = train.warmup * train.steps, train.decay * train.steps
    rise = min(1.0, step / warmup) if warmup else 1.0
    left = (train.steps - step + 1) / decay if decay else 1.0
    return train.lr * rise * (train.min_lr_fraction + (1 - train.min_lr_fraction) * min(1.0, left))


class Throughput:
    """Tokens a second since the first call, evaluations and samples included."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tokens_per_step, self.clock = tokens_per_step, clock
        self.start: tuple[int, float] | None = None

    def at(self, step: int) -> float | None:
        """None until a step has passed since the first call."""
        if self.start is None:
            self.start = (step, self.clock())
            return None
        steps, seconds = step - self.start[0], self.clock() - self.start[1]
        return steps * self.tokens_per_step / seconds if steps and seconds > 0 else None


def pick_device(name: str) -> torch.device:
    """auto -> cuda when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def is_finite(loss: float | None) -> bool:
    return loss is None or math.isfinite(loss)
