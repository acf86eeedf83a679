"""The value of train.optimizer: a name, or an optimizer class of torch or of the user's own."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator

from hqsweep.config.model import TARGET, Called
from hqsweep.errors import UserError

WHERE = f"train.optimizer.{TARGET}"
TAKEN = {"params": "the model's parameters", "lr": "train.lr", "weight_decay": "train.weight_decay"}
"""Arguments that hqsweep gives -> their source."""


class OptimizerConfig(Called):
    """An optimizer of the class `target` ("package.module.Class", also given as train.optimizer._target_), called with
    groups of parameters, lr, and `args`, which are all other keys. Only `hqsweep run` imports it."""

    WHERE, LIKE = WHERE, "torch.optim.nadam.NAdam"

    @model_validator(mode="before")
    @classmethod
    def _check(cls, section: Any) -> Any:
        """Refuse a section without a class, and arguments that hqsweep gives."""
        if isinstance(section, Mapping):
            if not {TARGET, "target"} & section.keys():
                raise UserError(f"{WHERE}: missing; give a class, such as {cls.LIKE}, or train.optimizer=NAME")
            for key in TAKEN.keys() & {**section.get("args", {}), **section}.keys():
                raise UserError(f"train.optimizer.{key}: hqsweep gives {TAKEN[key]}; leave it out")
        return section

    def __str__(self) -> str:
        return f"{self.target}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


def _kind(value: Any) -> str:
    return "class" if isinstance(value, Mapping | OptimizerConfig) else ""


Optimizer = Annotated[
    Annotated[Literal["adamw", "sgd", "muon"], Tag("")] | Annotated[OptimizerConfig, Tag("class")], Discriminator(_kind)
]
"""A name, or a section for a class."""
