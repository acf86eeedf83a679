"""Model and optimizer of a training, as its config has them."""

import torch

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.config.train import TrainConfig
from hqsweep.optim import FusedAdam
from hqsweep.recipe.base import AnyRecipe
from hqsweep.train.adapter import DTYPES, ModelAdapter, by_decay


def pick_device(name: str) -> torch.device:
    """auto -> cuda when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def adapted(config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe, device: torch.device) -> ModelAdapter:
    """The config's model on the device, in a recipe. UserError where a user's own model cannot be had."""
    if isinstance(config.model, ModelConfig):
        from hqsweep.train.model import GPTAdapter, build_model

        return GPTAdapter(build_model(config, vocab_size, recipe).to(device), config.model)
    from hqsweep.train.user_model import user_adapter

    return user_adapter(config, vocab_size, recipe, device, DTYPES[config.train.dtype])


def make_optimizer(adapter: ModelAdapter, train: TrainConfig) -> FusedAdam:
    """AdamW, on FP32 masters where weights are quantized; what decays, the adapter says."""
    decayed, others = by_decay(adapter.model, adapter.decayed())
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return FusedAdam(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=1e-8)
