"""The typed config: the one place where YAML becomes objects.

`parse` takes what composition gives (plain dicts), checks all of it, and returns a frozen ConvergenceConfig,
ParityConfig or CalibrateConfig. The sections stand in the other modules of this package. Their defaults come from
conf/; a test holds them together. A run's config.yaml is `config.model_dump(mode="json")`: every leaf, recipes in one
canonical form, so that equal runs have equal dicts.
"""

import itertools
import json
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hqsweep.config.command import CommandConfig
from hqsweep.config.jobs import JOBS
from hqsweep.config.keys import Job, RecipeKeys, Training
from hqsweep.config.model import ModelConfig, expert_width, ffn_width, has_experts
from hqsweep.config.section import Count, Device, Section, sentence
from hqsweep.config.train import TrainConfig
from hqsweep.errors import UserError, nearest
from hqsweep.formats.inputs import DISTRIBUTIONS, check_format
from hqsweep.recipe.argument import parse_recipe, recipe_config
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.factories import FindFactory, factory_name
from hqsweep.recipe.products import DeviceFault, GemmModule, attention_module, grouped_linear_module, linear_module
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.sectioned import Recipe
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.recipe.stages import stages
from hqsweep.recipe.validate import check_held_weights, check_parts, validate

KEPT = 1024
"""Results that a cache of texts and shapes keeps, for the runs of a grid that share them."""
FACTORY_KEYS = ("qfactory", "_target_")
"""Keys of a recipe that name a Python factory, which may give another quantizer each time."""
LinearShape = tuple[str, int, int]
"""Name, in_features and out_features of a linear."""


def linear_shapes(config: ModelConfig, vocab_size: int) -> list[LinearShape]:
    """Every linear of the GPT but grouped ones, in order, without building it."""
    dim, shapes = config.dim, []
    for i in range(config.layers):
        shapes += [(f"layers.{i}.attn.qkv", dim, 3 * dim), (f"layers.{i}.attn.proj", dim, dim)]
        if not has_experts(config, i):
            shapes += _mlp_shapes(f"layers.{i}.mlp", dim, ffn_width(config))
        elif config.shared_expert:
            shapes += _mlp_shapes(f"layers.{i}.mlp.shared", dim, expert_width(config))
    return [*shapes, (HEAD, dim, vocab_size)]


def grouped_shapes(config: ModelConfig) -> list[LinearShape]:
    """Every grouped linear of the GPT, with the features of each expert, in order."""
    layers, width = (i for i in range(config.layers) if has_experts(config, i)), expert_width(config)
    return [shape for i in layers for shape in _mlp_shapes(f"layers.{i}.mlp", config.dim, width)]


def _mlp_shapes(name: str, dim: int, hidden: int) -> list[LinearShape]:
    return [(f"{name}.fc1", dim, 2 * hidden), (f"{name}.fc2", hidden, dim)]


@lru_cache(KEPT)
def gemm_modules(config: ModelConfig, vocab_size: int, batch: int, context: int) -> tuple[GemmModule, ...]:
    """Every module of the GPT with matrix products, for a step of batch x context tokens, without building it."""
    linears = [linear_module(*shape, batch * context) for shape in linear_shapes(config, vocab_size)]
    linears += [grouped_linear_module(*shape) for shape in grouped_shapes(config)]
    head_dim = config.dim // config.heads
    attention = [attention_module(f"layers.{i}.attn.dpa", head_dim, context) for i in range(config.layers)]
    return (*linears, *attention)


def _parsed(value: Mapping[str, Any], find: FindFactory) -> tuple[AnyRecipe, dict[str, Any]]:
    """(recipe, its canonical text) of a section. One without a Python factory is parsed once for all runs of a grid."""
    with suppress(TypeError, ValueError):  # a value that JSON does not have
        text = json.dumps(value)
        if not any(f'"{key}"' in text for key in FACTORY_KEYS):
            recipe, canonical = _parsed_text(text)
            return recipe, json.loads(canonical)
    recipe = parse_recipe(value, find)
    return recipe, recipe_config(recipe)


@lru_cache(KEPT)
def _parsed_text(text: str) -> tuple[AnyRecipe, str]:
    recipe = parse_recipe(json.loads(text))
    return recipe, json.dumps(recipe_config(recipe))


class RecipeConfig(RecipeKeys):
    """A recipe in canonical text form; whatever parse_recipe takes is accepted.

    Either qfactory and fp8_dpa are given or the sections from linear to overrides; the others are None.
    """

    _recipe: AnyRecipe = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _canonical(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(value, Mapping):
            raise UserError(f"recipe: got {value!r}; it takes a mapping, or the name of a recipe as recipe=NAME")
        recipe, canonical = _parsed(value, (info.context or {}).get("find", factory_name))
        section = handler({"name": value.get("name")} | canonical)
        section._recipe = recipe
        return section

    def build(self) -> AnyRecipe:
        """The recipe itself, its schedule included, as it was parsed with the config."""
        return self._recipe

    @property
    def has_names(self) -> bool:
        """Whether one of its Python factories is a name alone, so that its quantizers are unknown."""
        return any(isinstance(stage, CustomRecipe) and stage.is_name for stage in self._stages)

    @property
    def comm_ranks(self) -> int:
        """The most ranks between which a stage of it exchanges gradients, emulated; 0 without an exchange."""
        comms = [comm for stage in self._stages if (comm := getattr(stage, "comm", None))]
        return max((comm.ranks for comm in comms), default=0)

    @property
    def _stages(self) -> list[AnyRecipe]:
        return [self._recipe, *(change.recipe for change in self._recipe.schedule)]


Shape = Annotated[list[Count], Field(min_length=2, max_length=2)]
"""[rows, columns]."""
Names = Annotated[list[str], Field(min_length=1)]
PARITY_CHECKS = (
    "kernel", "statistics", "vanilla", "routing", "pairs", "causality", "grouped", "modules", "switch", "export",
    "repeat", "resume", "weights", "recompute", "offload", "roundtrip",
)  # fmt: skip
"""Names of the checks of the parity job, whose functions are in jobs/parity."""
CALIBRATE_DISTRIBUTIONS = ("normal", "laplace", "t5", "t3", "outlier_channels", "token_scale_2", "token_scale_4")
"""Names of the distributions of the calibrate job, whose functions are in jobs/calibration.py."""


class ParitySection(Section):
    """Formats, distributions and shapes that are compared to the byte, and the checks that compare them.

    ranks: the numbers of processes on this machine whose joint results are compared with one process: 2, 4 or [2,4].
    """

    formats: Names
    distributions: Names
    shapes: Annotated[list[Shape], Field(min_length=1)]
    checks: Names
    device: Device = "auto"
    ranks: list[Literal[2, 4]] = Field(default_factory=list)

    @field_validator("ranks", mode="before")
    @classmethod
    def _one_or_many(cls, ranks: Any) -> Any:
        return [ranks] if type(ranks) is int else ranks

    @model_validator(mode="after")
    def _known(self) -> "ParitySection":
        for key, known in (("distributions", DISTRIBUTIONS), ("checks", PARITY_CHECKS)):
            for name in getattr(self, key):
                _check_known(f"parity.{key}", name, known)
        for text, shape in itertools.product(self.formats, self.shapes):
            check_format(text, shape, "parity")
        return self


class CalibrateSection(Section):
    """Formats and distributions of the SQNR tables, whose matrices have `shape`; students are linear sections of a
    recipe by name, each trained for `steps`."""

    formats: Names
    distributions: Names
    shape: Shape
    students: dict[str, Any]
    steps: Count = 1500
    device: Device = "auto"

    @field_validator("students")
    @classmethod
    def _sections(cls, students: dict[str, Any]) -> dict[str, dict[str, str]]:
        """Canonical text of each section. Delayed scaling is refused: no scale outlives a step here."""
        sections = {
            name: LinearQuantizers.parse(value, f"calibrate.students.{name}") for name, value in students.items()
        }
        for name, section in sections.items():
            if any(q.delayed for q in (section.input, section.weight, section.grad_output)):
                raise UserError(f"calibrate.students.{name}: fp8_delayed has no error of its own; give fp8_current")
        return {name: section.texts() for name, section in sections.items()}

    @model_validator(mode="after")
    def _known(self) -> "CalibrateSection":
        for name in self.distributions:
            _check_known("calibrate.distributions", name, CALIBRATE_DISTRIBUTIONS)
        for text in self.formats:
            check_format(text, self.shape, "calibrate")
        return self


def _check_known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UserError(f"{where}: got '{name}'{nearest(name, known)}; known are {', '.join(known)}")


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
    def _exchanged(self) -> "ConvergenceConfig":
        ranks, train = self.recipe.comm_ranks, self.train
        if ranks and train.parallel.world > 1:
            raise UserError(
                f"recipe.comm: emulates {ranks} ranks in one process, but train.parallel has {train.parallel.world}"
                " ranks; leave one of them out"
            )
        if ranks and train.batch % (ranks * train.microbatches):
            raise UserError(
                f"recipe.comm.ranks: {train.batch} sequences (train.batch) do not divide into {ranks} ranks of"
                f" {train.microbatches} microbatches; give a multiple of {ranks * train.microbatches}"
            )
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
        recipe = self.recipe.build()
        if not isinstance(self.model, ModelConfig):
            self.check_recipe(None)
        elif not self.recipe.has_names:
            check = _check_gpt if isinstance(recipe, Recipe) else _check_gpt.__wrapped__
            check(recipe, self.own_steps, self._gpt(self.data.vocab_estimate), self.train.parallel.tp)
        return self

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        return self.train.batch // (self.train.microbatches * max(1, self.recipe.comm_ranks))

    def gemm_modules(self, vocab_size: int) -> list[GemmModule] | None:
        """The modules of the GPT with matrix products; None for a model of a user's own, which has to be built for
        them (models.shapes)."""
        if not isinstance(self.model, ModelConfig):
            return None
        return list(gemm_modules(*self._gpt(vocab_size)))

    def _gpt(self, vocab_size: int) -> "GPTShape":
        """The arguments of gemm_modules()."""
        return self.model, vocab_size, self.microbatch, self.train.context

    def check_recipe(self, modules: Sequence[GemmModule] | None, device_fault: DeviceFault | None = None) -> None:
        """UserError with every GEMM of the modules that the recipe, or for gemm=native a known device, cannot do. With
        None only the recipe's schedule is checked. Nothing is known of a Python factory that was not imported."""
        if self.recipe.has_names:
            return
        if modules is None:
            stages(self.recipe.build(), self.own_steps)
        else:
            validate(self.recipe.build(), self.own_steps, modules, device_fault)


GPTShape = tuple[ModelConfig, int, int, int]
"""A GPT, its vocabulary, and the sequences of a microbatch with their tokens."""


@lru_cache(KEPT)
def _check_gpt(recipe: AnyRecipe, steps: int, shape: GPTShape, tp: int) -> None:
    """Raise UserError for a recipe that a GPT cannot run. Runs of a grid that differ only in seed share the check."""
    modules = gemm_modules(*shape)
    validate(recipe, steps, modules)
    if tp > 1:
        check_parts(recipe, steps, modules, tp)
    if shape[0].quantized_weights:
        check_held_weights(recipe, steps, modules)


def _check_fork(config: ConvergenceConfig) -> None:
    """Raise UserError for settings that a run of a fork study cannot have."""
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
        """A small GPT for the checks that train. It does not log at its middle step, so that a run resumed there covers
        sums. sampled: take statistics at every step."""
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
    """Compare the errors of formats, products and trained students with theory."""

    job: Literal["calibrate"]
    calibrate: CalibrateSection


Config = ConvergenceConfig | CommandConfig | ParityConfig | CalibrateConfig


def parse(config: Mapping[str, Any], find: FindFactory = factory_name, *, recorded: bool = False) -> Config:
    """The typed config of a run. find: resolves the Python factory of a recipe; by default the factory stays a name,
    and its quantizers are not checked. recorded: the run is trained, and its data may be gone.

    Raises:
        UserError: all faults in one line, each with its key path, the value, and the allowed values.
    """
    job = config.get("job")
    if job not in JOBS:
        fault = f"got {job!r}{nearest(str(job), JOBS)}" if job is not None else "missing"
        raise UserError(
            f"job: {fault}; must be one of {', '.join(JOBS)} (defaults: [convergence] in a YAML gives all keys)"
        )
    model = config_class(job)
    try:
        return model.model_validate(dict(config), context={"find": find, "recorded": recorded})
    except ValidationError as error:
        raise UserError(sentence(error, model)) from None


def config_class(job: str) -> type[Job]:
    """The class of a job's config."""
    return pkgutil.resolve_name(JOBS[job].config)
