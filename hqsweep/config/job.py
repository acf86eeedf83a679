"""The typed config: the one place where YAML becomes objects.

`parse` takes what composition gives (plain dicts), checks all of it, and returns a frozen ConvergenceConfig,
ParityConfig or CalibrateConfig. The sections stand in the other modules of this package. Their defaults are those of
conf/; a test holds them together. A run's config.yaml is `config.model_dump(mode="json")`: every leaf, recipes in one
canonical form, so that equal runs have equal dicts.
"""

import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from hqsweep.config.checks import CalibrateSection, ParitySection
from hqsweep.config.errors import sentence
from hqsweep.config.gemms import gemm_modules
from hqsweep.config.jobs import JOBS
from hqsweep.config.keys import Job, Training
from hqsweep.config.model import ModelConfig
from hqsweep.config.recipe import RecipeConfig
from hqsweep.config.train import TrainConfig
from hqsweep.errors import UserError, nearest
from hqsweep.recipe.factories import FindFactory, factory_name
from hqsweep.recipe.parts import check_parts
from hqsweep.recipe.stages import stages
from hqsweep.recipe.validate import DeviceFault, GemmModule, check_held_weights, validate


class ConvergenceConfig(Training):
    """Train one model under one recipe."""

    recipe: RecipeConfig

    @property
    def start(self) -> int:
        """Steps of the trunk that come before the run's own."""
        return self.fork.start if self.fork else 0

    @property
    def own_steps(self) -> int:
        """Steps of the run itself."""
        return self.train.steps - self.start

    @property
    def points(self) -> list[int]:
        """The steps of a trunk at which forks begin; [] for other runs."""
        return self.fork.at if self.fork and self.fork.is_trunk else []

    @model_validator(mode="after")
    def _forked(self) -> "ConvergenceConfig":
        if self.fork is not None:
            _check_fork(self)
        return self

    @model_validator(mode="after")
    def _captured(self) -> "ConvergenceConfig":
        if self.stats.capture_at is not None and self.stats.capture_at > self.train.steps:
            raise UserError(
                f"stats.capture_at: step {self.stats.capture_at} is after the last; give 1 to {self.train.steps}"
                " (train.steps)"
            )
        return self

    @model_validator(mode="after")
    def _recipe_fits(self) -> "ConvergenceConfig":
        modules = self.gemm_modules(self.data.vocab_estimate)
        self.check_recipe(modules)
        if modules and self.train.parallel.tp > 1 and not self.recipe.has_names:
            check_parts(self.recipe.build(), self.own_steps, modules, self.train.parallel.tp)
        if modules and self.model.quantized_weights and not self.recipe.has_names:
            check_held_weights(self.recipe.build(), self.own_steps, modules)
        return self

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        return self.train.batch // self.train.microbatches

    def gemm_modules(self, vocab_size: int) -> list[GemmModule] | None:
        """The modules of the GPT with matrix products; None for a model of a user's own, which has to be built for
        them (models.shapes)."""
        if not isinstance(self.model, ModelConfig):
            return None
        return gemm_modules(self.model, vocab_size, self.microbatch, self.train.context)

    def check_recipe(self, modules: Sequence[GemmModule] | None, device_fault: DeviceFault | None = None) -> None:
        """UserError with every GEMM of the modules that the recipe, or for gemm=native a known device, cannot do. With
        None only the recipe's schedule is checked. Nothing is known of a Python factory that was not imported."""
        if self.recipe.has_names:
            return
        if modules is None:
            stages(self.recipe.build(), self.own_steps)
        else:
            validate(self.recipe.build(), self.own_steps, modules, device_fault)


def _check_fork(config: ConvergenceConfig) -> None:
    """UserError for what a run of a fork study cannot have."""
    fork, train, default = config.fork, config.train, TrainConfig()
    if train.steps != fork.last:
        raise UserError(f"train.steps: {train.steps}, but the last step by fork is {fork.last}")
    for key, instead in (("warmup", "fork.warmup"), ("decay", "fork.decay"), ("min_lr_fraction", "fork.decay")):
        if getattr(train, key) != getattr(default, key):
            raise UserError(
                f"train.{key}: is not read in a fork study, whose learning rate has fork.warmup steps of rise and"
                f" fork.decay of fall to 0; leave it at {getattr(default, key)} and give {instead}"
            )
    if config.stats.capture_at is not None:
        raise UserError("stats.capture_at: a fork study has no one step for it; capture in a run from scratch")
    if fork.is_trunk and config.recipe.schedule:
        raise UserError(
            f"recipe.schedule: {config.recipe.name} is the baseline, in whose recipe the trunks of a fork study are"
            " trained, and it changes on the way; give a baseline without a schedule"
        )


class ParityConfig(Job):
    """Compare kernels with the reference and hybrid routing with single-format runs."""

    job: Literal["parity"]
    parity: ParitySection

    def training(
        self, name: str, linear: object, *, quantized_weights: bool = False, sampled: bool = False, **train: object
    ) -> ConvergenceConfig:
        """A small GPT for the checks that train; half of its steps is no step that logs, so resuming covers sums.
        sampled: every step is."""
        config = {
            "job": "convergence", "sweep": self.sweep, "seed": self.seed,
            "recipe": {"name": re.sub(r"[^A-Za-z0-9._+-]", "_", name), "linear": linear},
            "model": {"dim": 64, "layers": 1, "heads": 2, "quantized_weights": quantized_weights},
            "data": {"source": "markov", "markov": {"length": 20_000}},
            "train": {"steps": 6, "batch": 4, "context": 32, "log_every": 2, "eval_batches": 1, **train},
            "stats": {"every": int(sampled)},
        }  # fmt: skip
        return ConvergenceConfig.model_validate(config)


class CalibrateConfig(Job):
    """Compare the errors of formats, products and trained students with what theory says."""

    job: Literal["calibrate"]
    calibrate: CalibrateSection


Config = ConvergenceConfig | ParityConfig | CalibrateConfig


def parse(config: Mapping[str, Any], find: FindFactory = factory_name) -> Config:
    """The typed config of a run. What a Python factory of its recipe is, `find` says; by default a name, which is
    imported nowhere and whose quantizers are not checked.

    Raises:
        UserError: all faults in one line, each with its key path, what came, and what is allowed.
    """
    job = config.get("job")
    if job not in JOBS:
        fault = f"got {job!r}{nearest(str(job), JOBS)}" if job is not None else "missing"
        raise UserError(
            f"job: {fault}; must be one of {', '.join(JOBS)} (defaults: [convergence] in a YAML gives all keys)"
        )
    model = config_class(job)
    try:
        return model.model_validate(dict(config), context={"find": find})
    except ValidationError as error:
        raise UserError(sentence(error, model)) from None


def config_class(job: str) -> type[Job]:
    """The class of a job's config."""
    return pkgutil.resolve_name(JOBS[job].config)
