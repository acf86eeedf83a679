"""The keys of a run and their plain values, without the meaning of its recipe.

A mistyped key is reported before torch is imported, which takes longer than all else here. job.py checks the meaning of
the recipe.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hqsweep.config.engine import EngineConfig, TrackConfig, gpus_asked
from hqsweep.config.model import Model, ModelConfig, has_experts
from hqsweep.config.recipe_text import check_pairs, check_texts
from hqsweep.config.section import Name, Section, sentence
from hqsweep.config.study import ForkConfig
from hqsweep.config.train import Data, DataConfig, ParallelConfig, StatsConfig, TrainConfig, sharing_gpus
from hqsweep.errors import UserError

KEPT = 1024
"""Texts of recipes whose checks have passed."""


class Job(Section):
    """The keys that all jobs have."""

    sweep: Name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    runs_dir: str = "runs"
    track: TrackConfig = TrackConfig()
    engine: EngineConfig = EngineConfig()


class RecipeKeys(Section):
    """The keys of a recipe in canonical form: either qfactory and fp8_dpa are given or the sections from linear to
    overrides; the others are None."""

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


class Training(Job):
    """The keys of a training, whose recipe is whatever came."""

    job: Literal["convergence"]
    recipe: RecipeKeys | Any
    model: Model = ModelConfig()
    data: Data = DataConfig()
    train: TrainConfig = TrainConfig()
    stats: StatsConfig = StatsConfig()
    fork: ForkConfig | None = None

    @model_validator(mode="after")
    def _parallel(self) -> "Training":
        if isinstance(self.model, ModelConfig):
            self.train.parallel.check_model(self.model)
        check_machines(self.train.parallel, self.engine)
        if self.train.parallel.world > 1:
            check_possible(self)
        return self


def check_machines(dims: ParallelConfig, engine: EngineConfig) -> None:
    """UserError where machines, or the GPUs of one, do not share out the ranks, or Slurm is asked for too few GPUs."""
    nodes, gpus, gres = engine.slurm.nodes, engine.gpus_per_run, engine.slurm.gres
    if dims.world % nodes:
        raise UserError(
            f"engine.slurm.nodes: {nodes} machines do not share out the {dims.world} ranks of train.parallel"
            f" ({dims.formula}); give a divisor"
        )
    ranks = dims.world // nodes
    if gpus is not None and ranks % gpus:
        raise UserError(
            f"engine.gpus_per_run: {gpus} GPUs do not share out a machine's ranks, of which there are {ranks}"
            f" (train.parallel: {dims.formula}, engine.slurm.nodes={nodes}); give a divisor, or leave it out"
        )
    if dims.world == 1:
        return
    if (engine.runs_per_gpu or 1) > 1:
        raise UserError(
            f"engine.runs_per_gpu: {engine.runs_per_gpu}, but a run of several ranks ({dims.formula}) shares its GPUs"
            " with no other; give null"
        )
    asked = gpus_asked(gres or "")
    if asked and asked < (gpus or ranks):
        raise UserError(
            f"engine.slurm.gres: '{gres}' for {ranks} ranks on each machine ({dims.formula}); give gpu:{gpus or ranks},"
            f" or engine.gpus_per_run={sharing_gpus(ranks, asked)} to try it out with several ranks on a GPU"
        )


def check_possible(training: Training) -> None:
    """Raise UserError for settings that several ranks cannot run, or not yet."""
    train, dims = training.train, training.train.parallel
    axes = () if isinstance(training.model, ModelConfig) else ("tp", "ep", "pp")
    for axis in axes:
        if getattr(dims, axis) > 1:
            raise UserError(
                f"train.parallel.{axis}: {getattr(dims, axis)}, but ranks of a model of your own have a copy each"
                f" (dp_replicate) or share out one (dp_shard); give {axis}=1"
            )
    if dims.tp > 1:
        check_shared_matrices(training)
    if train.offload and dims.pp > 1:
        raise UserError("train.parallel.pp: several stages, but train.offload is true; give one of them")
    if train.compile == "graph" and dims.pp > 1:
        raise UserError(
            "train.parallel.pp: several stages, which no CUDA graph holds, but train.compile is graph; give auto"
        )
    if train.compile == "graph" and dims.ep > 1 and dims.expert_room is None:
        raise UserError(
            "train.parallel.ep: experts over ranks, for whose numbers of rows the host waits, but train.compile is"
            f" graph; give train.parallel.expert_room={dims.ep}, or auto"
        )


def check_shared_matrices(training: Training) -> None:
    """Raise UserError for settings that a training with tp cannot have."""
    dims = training.train.parallel
    if training.train.context % dims.tp:
        raise UserError(f"train.parallel.tp: {dims.tp} does not divide train.context ({training.train.context})")


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise one UserError with all faults of a training's config, except faults in the meaning of its recipe.

    Then raise one for pairs of formats without a product, in parts that every model of its kind has.
    """
    if config.get("job") != "convergence":
        return
    recipe = config.get("recipe")
    _once(check_texts, "recipe", recipe)
    try:
        model = Training.model_validate(dict(config)).model
    except ValidationError as error:
        raise UserError(sentence(error, Training)) from None
    if not isinstance(model, ModelConfig):
        _once(check_pairs, recipe, ("linear",))
        return
    grouped = ("grouped_linear",) if has_experts(model, model.layers - 1) else ()
    _once(check_pairs, recipe, ("linear", *grouped, "dpa", "head"))


def _once(check: Callable[..., None], *args: Any) -> None:
    """Call `check`, unless it has passed with equal arguments: the runs of a grid share few recipes."""
    try:
        text = json.dumps(args)
    except (TypeError, ValueError):  # a value that JSON does not have
        check(*args)
    else:
        _check_text(check, text)


@lru_cache(KEPT)
def _check_text(check: Callable[..., None], args: str) -> None:
    check(*json.loads(args))
