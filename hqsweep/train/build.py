"""The parts of a training that its config describes: device, model, optimizer, learning rate, and native GEMMs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.config.optimizer import WHERE, OptimizerConfig
from hqsweep.config.train import TrainConfig
from hqsweep.errors import UserError
from hqsweep.gemm import native
from hqsweep.optim import FusedAdam
from hqsweep.optim.other import OtherOptimizer, built
from hqsweep.optim.rules import RuledOptimizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.train.adapter import DTYPES, ModelAdapter, by_decay


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is cuda where there is a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def adapted(config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe, device: torch.device) -> ModelAdapter:
    """The config's model on the device, in a recipe. UserError where a user's own model cannot be loaded."""
    if isinstance(config.model, ModelConfig):
        from hqsweep.train.model import GPTAdapter, build_model

        return GPTAdapter(build_model(config, vocab_size, recipe).to(device), config.model)
    from hqsweep.train.user_model import user_adapter

    return user_adapter(config, vocab_size, recipe, device, DTYPES[config.train.dtype])


def make_optimizer(adapter: ModelAdapter, train: TrainConfig) -> FusedAdam:
    """train.optimizer, with FP32 masters where weights are quantized. The adapter says which parameters decay, and
    which Muon takes; all others then take AdamW. UserError where Muon would take none, and as check_class."""
    decayed, others = by_decay(adapter.model, adapter.decayed())
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if isinstance(train.optimizer, OptimizerConfig):
        return _of_class(groups, train.optimizer, train.lr)
    options = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": 1e-8}
    if (train.optimizer, train.moments) == ("adamw", "fp32"):
        return FusedAdam(groups, **options)
    rule = train.optimizer
    if rule == "muon":
        inner = {id(p) for p in adapter.hidden()}
        if not inner:
            raise UserError(
                "train.optimizer: muon is for 2D weights of hidden layers, and"
                f" {type(adapter.model).__name__} has none; give adamw or sgd"
            )
        hidden, rest = ([p for p in decayed if (id(p) in inner) == wanted] for wanted in (True, False))
        groups = [groups[0] | {"params": hidden}, groups[0] | {"params": rest}, groups[1]]
    groups = [group | {"rule": rule if rule == "sgd" or not place else "adamw"} for place, group in enumerate(groups)]
    groups = [group for group in groups if group["params"]]
    return RuledOptimizer(groups, momentum=train.momentum, moments=train.moments, **options)


def _of_class(groups: list[dict[str, Any]], section: OptimizerConfig, lr: float) -> OtherOptimizer:
    """The optimizer of a class, tried once on two parameters before the first step."""
    from hqsweep.models.build import code_of_modules

    check_class(section)
    names = {cls.__module__ for cls in getattr(section.factory, "__mro__", (section.factory,))}
    build = partial(section.factory, **section.args)
    return OtherOptimizer(groups, build, where=f"{WHERE}: {section}", code=code_of_modules(names), lr=lr)


OPTIMIZER_CODE = "optimizer_code"
"""The key of the code of train.optimizer._target_ in a checkpoint and in the manifest."""


def optimizer_facts(optimizer: FusedAdam) -> dict[str, str]:
    """{OPTIMIZER_CODE: the code of a class that is not torch's}; else {}."""
    code = getattr(optimizer, "code", "")
    return {OPTIMIZER_CODE: code} if code else {}


def check_optimizer_code(train: TrainConfig, facts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """UserError for a state that an optimizer with other code than in `facts` has saved."""
    if OPTIMIZER_CODE in facts:
        from hqsweep.models.build import check_code

        check_code(train.optimizer.target, state.get(OPTIMIZER_CODE), facts[OPTIMIZER_CODE], WHERE)


def check_class(section: OptimizerConfig) -> None:
    """UserError for a class that is not imported here, or that makes no optimizer of a matrix and a vector."""
    if not section.is_imported:
        raise UserError(f"{WHERE}: {section.target} is a Python class, which is not imported here")
    tried = [{"params": [nn.Parameter(torch.zeros(size))], "weight_decay": 0.0} for size in ((2, 2), (2,))]
    built(partial(section.factory, **section.args), tried, 1e-3, f"{WHERE}: {section}")


def learning_rate(train: TrainConfig, step: int) -> float:
    """The learning rate of a step: warm-up, stable, decay (WSD).

    It rises linearly over the share `warmup` of the steps, and falls linearly to min_lr_fraction over the last `decay`.
    """
    warmup, decay = train.warmup * train.steps, train.decay * train.steps
    rise = min(1.0, step / warmup) if warmup else 1.0
    left = (train.steps - step + 1) / decay if decay else 1.0
    return train.lr * rise * (train.min_lr_fraction + (1 - train.min_lr_fraction) * min(1.0, left))


def check_native(config: ConvergenceConfig, device: torch.device, vocab_size: int) -> None:
    """UserError that lists all GEMMs on gemm=native for which the device has no product. No GEMM falls back to
    gemm=exact."""
    from hqsweep.models.build import gemm_modules

    recipe = config.recipe.build()
    if "native" not in (recipe.gemm, *(change.recipe.gemm for change in recipe.schedule)):
        return
    capability = native.capability_of(device)
    if missing := native.device_fault(capability):
        here = "the CPU" if capability is None else torch.cuda.get_device_name(device)
        raise UserError(f"recipe: {missing}; this run is on {here}; recipe.gemm=exact multiplies the same operands")
    config.check_recipe(gemm_modules(config, vocab_size), partial(native.refusal, capability))
