"""Checks of users' own models before anything starts.

They check the recipes of the grid by the shapes of modules, try each model on a few tokens, and read the vocabulary of
data if the model needs it. Files are checked before torch is imported (checkpoints.user_model).
"""

from collections.abc import Iterable, Sequence

from hqsweep.checkpoints.foreign.user_model import KNOWN_VOCABULARY, check_weights, model_digest
from hqsweep.config.job import Config, ConvergenceConfig
from hqsweep.config.model import HFModelConfig, UserModel
from hqsweep.config.train import FactoryDataConfig
from hqsweep.errors import UserError
from hqsweep.sweep.grid.point import GridPoint
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
    from hqsweep.train.trial import check_batch, check_trial

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
