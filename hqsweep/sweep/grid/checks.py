"""Checks of a grid before anything starts: arms that would repeat another arm, and users' own models.

An arm may quantize nothing on its model, or get the operands of another arm there. Such arms are named: their runs
would repeat the runs of the other arm, and an equal loss would say nothing of the recipe.

Checks of users' own models check the recipes of the grid by the shapes of modules, try each model on a few tokens, and
read the vocabulary of data if the model needs it. Files are checked before torch is imported (checkpoints.user_model).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.checkpoints.user_model import KNOWN_VOCABULARY, check_weights, model_digest
from hqsweep.config.job import Config, ConvergenceConfig
from hqsweep.config.model import TARGET, HFModelConfig, ModelConfig, UserModel
from hqsweep.config.train import FactoryDataConfig
from hqsweep.errors import UserError
from hqsweep.recipe.applied import TABLES, Applied, applied, asks, why_nothing
from hqsweep.recipe.products import GemmModule
from hqsweep.sweep.grid.arms import GridPoint, is_trunk, section
from hqsweep.sweep.store.names import NOT_IN_ID
from hqsweep.train.build import pick_device

OTHERS = ("megatron", "llm.c")
"""The layouts of shards that state no vocabulary."""


def hashed(config: Config) -> Config:
    """The config with the hash of its Hugging Face model."""
    if not isinstance(config, ConvergenceConfig) or not isinstance(config.model, HFModelConfig):
        return config
    model = config.model.model_copy(update={"hash": model_digest(config.model)})
    return config.model_copy(update={"model": model})


def check_recipes(points: Sequence[GridPoint], configs: Sequence[Config]) -> None:
    """Raise UserError for a recipe that a user's model cannot take, and for a model that cannot be trained on tokens.

    The message has the run's swept keys.
    """
    own = [pair for pair in zip(points, configs, strict=True) if _is_users(pair[1])]
    if any(isinstance(getattr(config, "data", None), FactoryDataConfig) for config in configs) and len(own) < len(
        points
    ):
        raise UserError("data._target_: hqsweep's own GPT takes tokens; give a model of your own, by model._target_")
    if not own:
        return
    from hqsweep.models.build import check_recompute, gemm_modules, outline
    from hqsweep.recipe.validate import check_held_weights
    from hqsweep.sweep.grid.trial import check_batch, check_trial

    known: set[str] = set()
    for point, config in own:
        content = config.model_dump_json(include={"model", "recipe", "train"})
        if content in known:
            continue
        known.add(content)
        try:
            if isinstance(config.model, HFModelConfig) and config.model.pretrained:
                _check_weights(config.model)
            if isinstance(config.data, FactoryDataConfig) or config.model.loss is not None:
                check_batch(config, on_cpu=_on_cpu(config))
            else:
                check_trial(config, on_cpu=_on_cpu(config))
            if config.train.recompute != "none" and (model := outline(config.model)) is not None:
                check_recompute(model, config.train.recompute)
            modules = gemm_modules(config, config.data.vocab_estimate)
            config.check_recipe(modules)
            if modules and config.model.quantized_weights:
                check_held_weights(config.recipe.build(), config.own_steps, modules)
        except UserError as error:
            where = f" (in the run with {' '.join(point.changed)})" if point.changed and len(points) > 1 else ""
            raise UserError(f"{error}{where}") from None


def _on_cpu(config: ConvergenceConfig) -> bool:
    """Whether the run is known to be on the CPU."""
    device = config.train.device
    return device == "cpu" or (config.engine.kind == "local" and pick_device(device).type == "cpu")


def _check_weights(section: HFModelConfig) -> None:
    from hqsweep.models.build import outline

    model = outline(section)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_weights(section, shapes, getattr(model, "all_tied_weights_keys", ()))


def check_vocabularies(configs: Iterable[ConvergenceConfig]) -> None:
    """UserError for a user's model that has fewer tokens than the data; reads the data where only it knows them."""
    own = [config for config in configs if _is_users(config) and not isinstance(config.data, FactoryDataConfig)]
    if not own:
        return
    from hqsweep.models.build import outline, vocab_fault
    from hqsweep.train import data

    for config in own:
        model = outline(config.model)
        known = config.data.source in KNOWN_VOCABULARY
        vocab_size = config.data.vocab_estimate if known else data.loaded(config.data).vocab_size
        if model is not None and (fault := vocab_fault(model, vocab_size)):
            guessed = config.data.source == "tokens" or data.loaded(config.data).facts.get("layout") in OTHERS
            stated = ", or say how many it has in meta.json beside it" if guessed else ""
            raise UserError(
                f"model: the data has {vocab_size} tokens, but {fault}; give another model, or other data{stated}"
            )


def _is_users(config: Config) -> bool:
    return isinstance(config, ConvergenceConfig) and isinstance(config.model, UserModel)


REMEDY = "Leave the arm out, or quantize what this model has"
FIRST = 4
"""The number of arms that a line names; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of a grid. settings: the config of its first run without recipe and seed. applied: None where its model
    or recipe is not known, as a Python function that is not imported here makes it."""

    name: str
    point: GridPoint
    config: ConvergenceConfig
    settings: str
    modules: tuple[GemmModule, ...] = ()
    applied: Applied | None = None

    @property
    def is_vain(self) -> bool:
        """Whether its recipe asks for low precision, and gives none to this model."""
        return self.applied is not None and not self.applied.quantizes and bool(asks(self.config.recipe.build()))


def repeat_lines(points: Sequence[GridPoint], configs: Sequence[Config], baseline: str | None) -> tuple[str, ...]:
    """A line for each arm that quantizes nothing on its model, or that has the operands of another arm at the same
    settings; and one line for arms whose operands are unknown. baseline: the arm or recipe that others are measured
    against."""
    arms = _arms(points, configs)
    said = [f"warning: {line}" for line in _known([arm for arm in arms if arm.applied is not None], baseline)]
    unknown = [arm for arm in arms if arm.applied is None and asks(arm.config.recipe.build())]
    if unknown:
        key = f"model.{TARGET}" if getattr(unknown[0].config.model, "target", None) else "recipe.qfactory"
        said.append(
            f"not known here: whether {_named(unknown)} quantize{'s' * (len(unknown) == 1)} anything on this model;"
            f" `hqsweep run` says it before its first run, as that imports the function of {key}, and this does not"
        )
    return tuple(said)


def _arms(points: Sequence[GridPoint], configs: Sequence[Config]) -> list[Arm]:
    """Each arm of the trainings by its first run; the runs of one arm differ in seed and fork point alone."""
    arms: dict[str, Arm] = {}
    for point, config in zip(points, configs, strict=True):
        if isinstance(config, ConvergenceConfig) and not is_trunk(point) and point.arm not in arms:
            modules, own = _modules(config), None
            if modules is not None:
                own = applied(config.recipe.build(), config.own_steps, modules)
            arms[point.arm] = Arm(
                name=point.arm, point=point, config=config, settings=_settings(point.config),
                modules=modules or (), applied=own,
            )  # fmt: skip
    return list(arms.values())


def _modules(config: ConvergenceConfig) -> tuple[GemmModule, ...] | None:
    """The modules whose slots the recipe fills; None where they, or the recipe, are not known."""
    if config.recipe.has_names:
        return None
    if isinstance(config.model, ModelConfig):
        return (*config.gemm_modules(config.data.vocab_estimate), *TABLES)
    from hqsweep.models.build import gemm_modules  # not for a GPT

    modules = gemm_modules(config, config.data.vocab_estimate)
    return None if modules is None else tuple(modules)


def _settings(config: dict[str, Any]) -> str:
    """The keys in which runs differ beside the recipe. A fork counts by its noise alone, as arms share their points."""
    own = {key: value for key, value in config.items() if key not in ("recipe", "seed", *NOT_IN_ID)}
    return json.dumps(own | {"fork": (own.get("fork") or {}).get("noise")}, sort_keys=True)


def _known(arms: Sequence[Arm], baseline: str | None) -> Iterator[str]:
    groups: dict[Any, list[Arm]] = {}
    for arm in arms:
        groups.setdefault((arm.settings, arm.applied), []).append(arm)
    for group in groups.values():
        measured = [arm for arm in group if _is_baseline(arm, baseline)]
        first, *others = [*measured, *(arm for arm in group if arm not in measured)]
        vain = [arm for arm in (*others, first) if arm.is_vain]
        for arm in vain:
            beside = first if arm is not first else next(iter(others), None)
            twin = f", so its runs repeat those of {_role(beside, measured)}" if beside else ""
            why = why_nothing(arm.config.recipe.build(), arm.modules)
            yield f"arm '{arm.name}' quantizes nothing on this model{twin}: {why}. {REMEDY}{_by(arm)}."
        others = [arm for arm in others if arm not in vain]
        if others and first.applied.quantizes:
            yield (
                f"arm{'s' * (len(others) > 1)} {_named(others)} {'have' if len(others) > 1 else 'has'} the operands of"
                f" {_role(first, measured)} on this model, so all their runs are equal. Leave all but one out."
            )


def _is_baseline(arm: Arm, baseline: str | None) -> bool:
    return baseline in (arm.name, arm.point.variant, section(arm.point, "recipe").get("name"))


def _role(arm: Arm, measured: Sequence[Arm]) -> str:
    return f"{'the baseline ' * (arm in measured)}'{arm.name}'"


def _by(arm: Arm) -> str:
    """The sections of a recipe that its modules take."""
    parts = dict.fromkeys("head" if m.name == "head" else m.module_type for m in arm.modules if m not in TABLES)
    return f" (by {', '.join(f'recipe.{part}' for part in parts)})" if parts else ""


def _named(arms: Sequence[Arm]) -> str:
    names = [f"'{arm.name}'" for arm in arms[:FIRST]]
    more = len(arms) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
