"""The typed config: the one place where YAML becomes objects.

`parse` takes what composition gives (plain dicts), checks all of it, and returns a frozen ConvergenceConfig,
ParityConfig or CalibrateConfig. Defaults here and in conf/ are the same; a test holds them together. What a run is
given is `config.model_dump(mode="json")`: every leaf, recipes in one canonical form, so that equal runs have equal
dicts.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hqsweep.config.checks import CalibrateSection, ParitySection
from hqsweep.config.engine import EngineConfig, TrackConfig
from hqsweep.config.errors import sentence
from hqsweep.config.model import ModelConfig
from hqsweep.config.types import Count, Device, Fraction, Index, Name, Positive, Section
from hqsweep.errors import UserError, nearest
from hqsweep.recipe.schedule import AnyRecipe, parse_recipe, recipe_config
from hqsweep.recipe.validate import DeviceFault, GemmModule, check_held_weights, validate
from hqsweep.train.model import Recompute, gemm_modules

TOKENS_VOCAB = 50304
"""Assumed for token shards until they are read: GPT-2's vocabulary, rounded up to a multiple of 64."""


class RecipeConfig(Section):
    """A recipe in canonical text form; whatever parse_recipe takes is accepted.

    Either qfactory and fp8_dpa are given or the sections from linear to overrides; the others are None.
    """

    name: Name
    linear: dict[str, str] | None = None
    grouped_linear: dict[str, str] | None = None
    dpa: dict[str, str] | None = None
    head: dict[str, str] | None = None
    embedding: str | None = None
    norm: str | None = None
    overrides: list[dict[str, Any]] | None = None
    qfactory: str | None = None
    fp8_dpa: bool | None = None
    gemm: str
    schedule: list[dict[str, Any]]

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise UserError(f"recipe: got {given!r}; it takes a mapping, or the name of a recipe as recipe=NAME")
        return {"name": given.get("name")} | recipe_config(parse_recipe(given))

    def build(self) -> AnyRecipe:
        """The recipe itself, its schedule included."""
        return parse_recipe(self.model_dump())


class MarkovConfig(Section):
    """The synthetic source; concentration is that of the Dirichlet rows, length is in tokens."""

    vocab: Annotated[int, Field(ge=2, le=65536)] = 16
    order: Count = 2
    concentration: Positive = 0.4
    seed: Index = 0
    length: Count = 1_000_000


class DataConfig(Section):
    """Where tokens come from; `path` is read by text and tokens, `markov` by markov."""

    source: Literal["stdlib", "text", "tokens", "markov"] = "stdlib"
    path: str | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    max_bytes: Count | None = None
    markov: MarkovConfig = MarkovConfig()

    @model_validator(mode="after")
    def _path(self) -> "DataConfig":
        if self.source in ("text", "tokens"):
            if self.path is None:
                raise UserError(f"data.path: missing; data.source={self.source} needs data.path=FILE_OR_FOLDER")
            if not Path(self.path).exists():
                raise UserError(f"data.path: '{self.path}' does not exist; it must be a file or a folder")
        elif self.path is not None:
            raise UserError(f"data.path: data.source={self.source} reads no path; add data=text or data=tokens")
        return self

    @property
    def vocab_estimate(self) -> int:
        """Vocabulary size before the data is read: exact for bytes and markov."""
        return {"markov": self.markov.vocab, "tokens": TOKENS_VOCAB}.get(self.source, 256)


class TrainConfig(Section):
    """AdamW with warmup, a constant stretch and a linear decay; warmup and decay are fractions of the steps.

    recompute: what backward computes again instead of keeping it; offload: the rest waits in CPU memory. A step runs
    its batch in `microbatches` equal parts, whose gradients add up.
    """

    steps: Count = 200
    batch: Count = 16
    microbatches: Count = 1
    context: Count = 128
    lr: Positive = 1e-3
    min_lr_fraction: Fraction = 0.1
    warmup: Fraction = 0.05
    decay: Fraction = 0.4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip: Positive = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: Device = "auto"
    recompute: Recompute = "none"
    offload: bool = False
    log_every: Count = 10
    eval_every: Count = 100
    eval_batches: Count = 8
    checkpoint_every: Count = 100

    @model_validator(mode="after")
    def _schedule(self) -> "TrainConfig":
        if self.warmup + self.decay > 1:
            raise UserError(
                f"train.warmup: {self.warmup} and train.decay {self.decay} are fractions of the steps and sum to more"
                " than 1; lower one of them"
            )
        if self.batch % self.microbatches:
            raise UserError(f"train.microbatches: {self.batch} sequences do not divide into {self.microbatches} parts")
        return self


class StatsConfig(Section):
    """Error statistics: every so many steps, 0 for never; `gemm` adds the error of each GEMM's output. At the step
    capture_at the operands of all linears are written to captured/ in the run's folder, for `hqsweep probe`."""

    every: Index = 100
    gemm: bool = True
    capture_at: Count | None = None


class Job(Section):
    """What all jobs have."""

    sweep: Name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    runs_dir: str = "runs"
    track: TrackConfig = TrackConfig()
    engine: EngineConfig = EngineConfig()


class ConvergenceConfig(Job):
    """Train one model under one recipe."""

    job: Literal["convergence"]
    recipe: RecipeConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    stats: StatsConfig = StatsConfig()

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
        self.check_recipe(self.data.vocab_estimate)
        if self.model.quantized_weights:
            check_held_weights(self.recipe.build(), self.train.steps, self._gemm_modules(self.data.vocab_estimate))
        return self

    def _gemm_modules(self, vocab_size: int) -> list[GemmModule]:
        part = self.train.batch // self.train.microbatches
        return gemm_modules(self.model, vocab_size, part, self.train.context)

    def check_recipe(self, vocab_size: int, device_fault: DeviceFault | None = None) -> None:
        """UserError with every GEMM of the model that the recipe, or for gemm=native a known device, cannot do."""
        validate(self.recipe.build(), self.train.steps, self._gemm_modules(vocab_size), device_fault)


class ParityConfig(Job):
    """Compare kernels with the reference and hybrid routing with single-format runs."""

    job: Literal["parity"]
    parity: ParitySection

    def training(
        self, name: str, linear: object, *, quantized_weights: bool = False, **train: object
    ) -> ConvergenceConfig:
        """A small GPT for the checks that train; half of its steps is no step that logs, so resuming covers sums."""
        config = {
            "job": "convergence", "sweep": self.sweep, "seed": self.seed,
            "recipe": {"name": re.sub(r"[^A-Za-z0-9._+-]", "_", name), "linear": linear},
            "model": {"dim": 64, "layers": 1, "heads": 2, "quantized_weights": quantized_weights},
            "data": {"source": "markov", "markov": {"length": 20_000}},
            "train": {"steps": 6, "batch": 4, "context": 32, "log_every": 2, "eval_batches": 1, **train},
            "stats": {"every": 0},
        }  # fmt: skip
        return ConvergenceConfig.model_validate(config)


class CalibrateConfig(Job):
    """Compare the errors of formats, products and trained students with what theory says."""

    job: Literal["calibrate"]
    calibrate: CalibrateSection


Config = ConvergenceConfig | ParityConfig | CalibrateConfig
JOBS: dict[str, type[Config]] = {
    "convergence": ConvergenceConfig, "parity": ParityConfig, "calibrate": CalibrateConfig,
}  # fmt: skip


def parse(config: Mapping[str, Any]) -> Config:
    """The typed config of a run.

    Raises:
        UserError: all faults in one line, each with its key path, what came, and what is allowed.
    """
    job = config.get("job")
    if job not in JOBS:
        given = f"got {job!r}{nearest(str(job), JOBS)}" if job is not None else "missing"
        raise UserError(
            f"job: {given}; must be one of {', '.join(JOBS)} (defaults: [convergence] in a YAML gives all keys)"
        )
    try:
        return JOBS[job].model_validate(dict(config))
    except ValidationError as error:
        raise UserError(sentence(error, JOBS[job])) from None
