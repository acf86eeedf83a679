"""The parts of a training that its config describes: device, model, optimizer, learning rate, and native GEMMs."""

from functools import partial

import torch

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.config.train import TrainConfig
from hqsweep.errors import UserError
from hqsweep.gemm import native
from hqsweep.models.build import gemm_modules
from hqsweep.optim import FusedAdam
from hqsweep.recipe.base import AnyRecipe
from hqsweep.train.model import DTYPES, ModelAdapter, by_decay


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
    """AdamW, with FP32 masters where weights are quantized. The adapter says which parameters decay."""
    decayed, others = by_decay(adapter.model, adapter.decayed())
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return FusedAdam(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=1e-8)


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
    recipe = config.recipe.build()
    if "native" not in (recipe.gemm, *(change.recipe.gemm for change in recipe.schedule)):
        return
    capability = native.capability_of(device)
    if missing := native.device_fault(capability):
        here = "the CPU" if capability is None else torch.cuda.get_device_name(device)
        raise UserError(f"recipe: {missing}; this run is on {here}; recipe.gemm=exact multiplies the same operands")
    config.check_recipe(gemm_modules(config, vocab_size), partial(native.refusal, capability))
