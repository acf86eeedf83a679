"""The section `model` of the config for models that are the user's own: one of Hugging Face, or one that a Python
function builds. Nothing here reads a file or imports code."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from hqsweep.config.model import ModelConfig
from hqsweep.config.types import Section
from hqsweep.errors import UserError

TARGET = "_target_"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


class UserModel(Section):
    """What all models of users have.

    head: whether the output projection takes the recipe's `head` section; if not, it is not converted. attention:
    whether attention computes by the recipe's `dpa`; None: where the recipe mentions it. quantized_weights: whether
    converted modules hold their weights as operands only, with masters in the optimizer. init_noise: every initial
    weight is multiplied by 1 + init_noise * N(0, 1), for a null arm.
    """

    head: bool = False
    attention: bool | None = None
    quantized_weights: bool = False
    init_noise: Annotated[float, Field(ge=0)] = 0.0


class HFModelConfig(UserModel):
    """A causal language model of Hugging Face, from a folder with config.json and safetensors, or, without its trained
    weights (pretrained=false), from config.json alone; nothing is downloaded, and no code of the folder is run.

    hash: the hash of its config and, where they are read, its weights; the sweep's command fills it in.
    """

    kind: Literal["hf"]
    path: str
    pretrained: bool = True
    hash: str | None = None


class FactoryModelConfig(UserModel):
    """A model that the function `target` ("package.module.function", also given as model._target_) returns for `args`,
    which are all keys of the section that are not its own. Only `hqsweep run` imports it."""

    _factory: Callable[..., Any] | None = PrivateAttr(default=None)
    kind: Literal["factory"]
    target: str
    args: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def _arguments(cls, section: Any) -> Any:
        """Move the keys that are arguments to `args`."""
        if not isinstance(section, Mapping):
            return section
        own = {key: value for key, value in section.items() if key in cls.model_fields}
        own.setdefault("kind", "factory")
        if TARGET in section:
            own["target"] = section[TARGET]
        if isinstance(named := own.get("target"), str) and not _PATH.fullmatch(named):
            raise UserError(f"model.{TARGET}: {named!r} is no package.module.function, such as my_models.build")
        args = {key: value for key, value in section.items() if key not in (*cls.model_fields, TARGET)}
        return own | ({"args": {**own.get("args", {}), **args}} if args else {})

    @model_validator(mode="after")
    def _find_factory(self, info: ValidationInfo) -> "FactoryModelConfig":
        """Look up the function, in a process that may import it; elsewhere it stays a name."""
        if find := (info.context or {}).get("find"):
            self._factory = find(self.target, f"model.{TARGET}")
        return self

    @property
    def factory(self) -> Callable[..., Any] | None:
        """The function, or its name (recipe.factories.FactoryName) where nobody might import it."""
        return self._factory


def model_kind(section: Any) -> str:
    """The kind of a section: "gpt", "hf" or "factory"; errors treat a section that is none of them as "gpt"."""
    if isinstance(section, UserModel):
        return section.kind
    if not isinstance(section, Mapping):
        return "gpt"
    kind = section.get("kind", "factory" if TARGET in section else "gpt")
    if "kind" in section and kind not in ("hf", "factory"):
        raise UserError(f"model.kind: got {kind!r}; must be hf or factory, and the GPT's section (model=gpt) has none")
    return kind


_GPT = Annotated[ModelConfig, Tag("gpt")]
_HF = Annotated[HFModelConfig, Tag("hf")]
_FACTORY = Annotated[FactoryModelConfig, Tag("factory")]
Model = Annotated[_GPT | _HF | _FACTORY, Discriminator(model_kind)]
"""The section: hqsweep's own GPT, which has no key `kind`, or a model of the user's own, which has."""
