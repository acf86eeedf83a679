"""The value of train.optimizer: a name, or an optimizer class of torch or of the user's own."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from hqsweep.config.model import TARGET, check_path, with_arguments
from hqsweep.config.section import Section
from hqsweep.errors import UserError

WHERE = f"train.optimizer.{TARGET}"
TAKEN = {"params": "the model's parameters", "lr": "train.lr", "weight_decay": "train.weight_decay"}
"""Arguments that hqsweep gives -> their source."""


class OptimizerConfig(Section):
    """An optimizer of the class `target` ("package.module.Class", also given as train.optimizer._target_), called with
    groups of parameters, lr, and `args`, which are all other keys. Only `hqsweep run` imports it."""

    _factory: Callable[..., Any] | None = PrivateAttr(default=None)
    target: str
    args: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def _arguments(cls, section: Any) -> Any:
        """Move the keys that are arguments to `args`."""
        if not isinstance(section, Mapping):
            return section
        own = with_arguments(section, cls.model_fields)
        if "target" not in own:
            raise UserError(f"{WHERE}: missing; give a class, such as torch.optim.nadam.NAdam, or train.optimizer=NAME")
        check_path(own["target"], WHERE, "torch.optim.nadam.NAdam")
        for key in TAKEN.keys() & own.get("args", {}).keys():
            raise UserError(f"train.optimizer.{key}: hqsweep gives {TAKEN[key]}; leave it out")
        return own

    @model_validator(mode="after")
    def _find(self, info: ValidationInfo) -> Self:
        """Look up the class, in a process that may import it; elsewhere it stays a name."""
        if find := (info.context or {}).get("find"):
            self._factory = find(self.target, WHERE)
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def factory(self) -> Any:
        """The class, or its name where this process does not import it."""
        return self._factory

    @property
    def is_imported(self) -> bool:
        """Whether this process may call the class."""
        return self._factory is not None and not getattr(self._factory, "is_name", False)

    def __str__(self) -> str:
        return f"{self.target}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


def _kind(value: Any) -> str:
    return "class" if isinstance(value, Mapping | OptimizerConfig) else ""


Optimizer = Annotated[
    Annotated[Literal["adamw", "sgd", "muon"], Tag("")] | Annotated[OptimizerConfig, Tag("class")], Discriminator(_kind)
]
"""A name, or a section for a class."""
