"""The keys of a run and their plain values, without the meaning of its recipe.

A mistyped key is reported before torch is imported, which takes longer than all else here. job.py checks the meaning of
the recipe.

The texts of a recipe's quantizers are checked here: names, options and sources, and the pairs of formats that meet in
a product.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hqsweep.config.engine import EngineConfig, TrackConfig, gpus_asked
from hqsweep.config.model import Model, ModelConfig, has_experts
from hqsweep.config.section import Name, Section, sentence
from hqsweep.config.study import ForkConfig
from hqsweep.config.train import Data, DataConfig, ParallelConfig, StatsConfig, TrainConfig, sharing_gpus
from hqsweep.errors import UserError
from hqsweep.formats.spec import (
    PROJECT_FIELD,
    QUANTIZER_FIELDS,
    FormatText,
    check_projection,
    check_source,
    directions,
    fields_of,
    quantizer_texts,
    split_projection,
)
from hqsweep.recipe.gemms import KEY as GEMMS_KEY
from hqsweep.recipe.gemms import expanded, section_texts
from hqsweep.recipe.pairs import GEMMS, MODULE_GEMMS, pair_fault
from hqsweep.recipe.roles import IN_HIGH_PRECISION, TENSOR_TYPES

PARTS = ("linear", "grouped_linear", "dpa", "head", "embedding", "norm")
"""The parts of a recipe that are quantizers: one for the part, or one for each tensor."""


def check_texts(key: str, value: Any) -> None:
    """Raise UserError with all texts that name no quantizer, in the value of the key recipe, a part, or a quantizer.

    A value of another kind passes, as do faults in the meaning of a recipe.
    """
    faults = []
    for where, check, text in _texts(key.split("."), value):
        try:
            check(text)
        except UserError as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise UserError("; ".join(faults))


def _texts(path: list[str], value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, check, text) for each text below a key."""
    where = ".".join(path)
    if path[0] != "recipe" or (path[1:2] and path[1] not in PARTS):
        return
    if path[-1] in QUANTIZER_FIELDS and isinstance(value, str):
        yield where, check_source if path[-1] == QUANTIZER_FIELDS[2] else fields_of, value
    elif path[-1] == PROJECT_FIELD and isinstance(value, str):
        yield where, fields_of, value
    elif len(path) > 2 and path[-1] == GEMMS_KEY and value is not None:
        yield where, section_texts, value
    elif len(path) > 1 and isinstance(value, str):
        yield where, _check_quantizer, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts([*path, str(name)], part)


def _check_quantizer(text: str) -> None:
    grid, host = split_projection(text)
    row, column, _ = quantizer_texts(host)
    fields_of(row)
    if column is not None:
        fields_of(column)
    if grid is not None:
        check_projection(grid, (row, row if column is None else column))


def check_pairs(recipe: Any, parts: Sequence[str]) -> None:
    """Raise UserError with all products of these parts whose operands cannot meet, for any sizes.

    parts: linear, grouped_linear, dpa, head. The caller has modules that follow these parts. Overrides, schedules and
    Python factories are not read. A part that one of them may change passes here; recipe.validate, which knows the
    modules, checks it.
    """
    if not isinstance(recipe, Mapping) or recipe.get("qfactory") or recipe.get("schedule"):
        return
    overrides = [entry for entry in recipe.get("overrides") or () if isinstance(entry, Mapping)]
    overridden = {key for entry in overrides for key in entry}
    mode, faults = str(recipe.get("gemm") or "exact"), []
    for part in parts:
        module = "dpa" if part == "dpa" else "linear"
        slots = {} if overridden & {part, module} else part_quantizers(recipe, part)
        if slots.keys() >= set(TENSOR_TYPES[module]):
            faults += [f"recipe.{part} {fault}" for fault in _pair_faults(slots, MODULE_GEMMS.get(part, GEMMS), mode)]
    if faults:
        raise UserError("; ".join(faults))


def part_quantizers(recipe: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return tensor -> quantizer (text or mapping) of a part of a recipe: as stated, or by default.

    {} if the value is no part.
    """
    tensors = TENSOR_TYPES.get(part, TENSOR_TYPES["linear"])
    default: dict[str, Any] = {}
    if part == "grouped_linear":
        default = part_quantizers(recipe, "linear")
    elif part in IN_HIGH_PRECISION:
        default = dict.fromkeys(tensors, IN_HIGH_PRECISION[part])
    value = recipe.get(part)
    if tensors == TENSOR_TYPES["linear"]:
        value = expanded(value, f"recipe.{part}")
    if value is None:
        return default
    if isinstance(value, Mapping) and "rowwise" not in value:
        return default | {tensor: quantizer for tensor, quantizer in value.items() if quantizer is not None}
    return dict.fromkeys(tensors, value) if isinstance(value, Mapping | str) else {}


def _pair_faults(slots: Mapping[str, Any], gemms: Mapping[str, Any], mode: str) -> Iterator[str]:
    """The faults of the products of a module with these quantizers."""
    try:
        formats = {tensor: _formats(value) for tensor, value in slots.items()}
    except UserError:  # no quantizer, which is told by who parses it
        return
    for gemm, operands in gemms.items():
        meeting = tuple(formats[tensor][direction] for tensor, direction in operands)
        spelled = [f"{t} {d} {f}" for (t, d), f in zip(operands, meeting, strict=True)]
        if fault := pair_fault(spelled, meeting, mode):
            yield f"{gemm}: {fault}"


def _formats(value: Any) -> dict[str, FormatText]:
    """Direction -> format of a quantizer. UserError where the value is none; quant.hybrid says more of it."""
    row, column = map(FormatText.parse, directions(split_projection(value)[1])[:2])
    return {"rowwise": row, "columnwise": column}


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
    comm: dict[str, Any] | None = None
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
        if getattr(self.model, "router", "free") == "replay":
            check_replay(self.train)
        if self.train.parallel.world > 1:
            check_possible(self)
        return self


def check_replay(train: TrainConfig) -> None:
    """UserError for trainings that replay no choices of the router."""
    if train.parallel.world > 1:
        raise UserError(
            f"model.router: replay runs in one process, but train.parallel has {train.parallel.world} ranks; give free"
        )
    if train.compile == "graph":
        raise UserError("train.compile: graph, but model.router=replay runs steps eagerly; give auto")


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
