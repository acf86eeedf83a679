"""The section `model` of the config: hqsweep's own GPT, or a model of the user's own.

A user's model is one of Hugging Face, or one that a Python function builds. Nothing here reads a file or imports code.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from hqsweep.config.section import Count, Index, Positive, Section
from hqsweep.errors import UserError


class ModelConfig(Section):
    """A GPT: RMSNorm, RoPE, SwiGLU; ffn is the hidden width of the SwiGLU, None for 8/3 of dim. With quantized_weights
    linears hold operands only, and masters live in the optimizer. init_noise: train.model.perturb, for a null arm.

    With experts, the MLPs from layer first_moe_layer on are mixtures, in which each token takes top_k of them. router:
    free, or replay. With replay each forward takes the choices of a forward in train.dtype on the same weights, which
    comes before it. So quantization changes no choice."""

    dim: Count = 128
    layers: Count = 2
    heads: Count = 4
    ffn: Count | None = None
    tied: bool = False
    rope_base: Positive = 10000.0
    quantized_weights: bool = False
    init_noise: Annotated[float, Field(ge=0)] = 0.0
    experts: Index = 0
    top_k: Count = 2
    expert_ffn: Count | None = None
    shared_expert: bool = False
    first_moe_layer: Index = 0
    load_balance: Annotated[float, Field(ge=0)] = 0.01
    router: Literal["free", "replay"] = "free"

    @model_validator(mode="after")
    def _heads(self) -> "ModelConfig":
        if self.dim % (2 * self.heads):
            raise UserError(
                f"model.dim: {self.dim} with {self.heads} heads; RoPE turns pairs, so each head needs an even width;"
                f" give a model.dim that is a multiple of {2 * self.heads}"
            )
        return self

    @model_validator(mode="after")
    def _experts(self) -> "ModelConfig":
        if self.experts and self.top_k > self.experts:
            raise UserError(f"model.top_k: {self.top_k} of {self.experts} experts; give 1 to {self.experts}")
        if self.experts and self.first_moe_layer >= self.layers:
            raise UserError(
                f"model.first_moe_layer: {self.first_moe_layer}, but the last layer is {self.layers - 1}; no layer"
                " would have experts (model.experts=0 says so)"
            )
        if self.router == "replay" and (not self.experts or self.quantized_weights):
            why = "model.quantized_weights leaves no values for it" if self.experts else "model.experts is 0"
            raise UserError(f"model.router: replay takes choices of a forward in high precision, but {why}; give free")
        return self


def ffn_width(config: ModelConfig) -> int:
    """Hidden width of SwiGLU: config.ffn, or 8/3 of dim rounded up to a multiple of 32."""
    return config.ffn or -(-8 * config.dim // (3 * 32)) * 32


def expert_width(config: ModelConfig) -> int:
    """Return the hidden width of each expert: config.expert_ffn, or ffn_width / top_k rounded up to a multiple of 32.

    So a token costs as much as in a dense model.
    """
    return config.expert_ffn or -(-ffn_width(config) // (config.top_k * 32)) * 32


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Whether the MLP of a layer is a mixture."""
    return config.experts > 0 and layer >= config.first_moe_layer


TARGET = "_target_"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


def check_path(path: Any, where: str, like: str) -> None:
    """UserError for text that is no package.module.function. where: the key; like: an example."""
    if isinstance(path, str) and not _PATH.fullmatch(path):
        raise UserError(f"{where}: {path!r} is no package.module.function, such as {like}")


class Called(Section):
    """A section for the user's own function or class `target`, called with `args`.

    WHERE: the key of `_target_`; LIKE: an example; GIVEN: keys that the section has in any case.
    """

    WHERE: ClassVar[str]
    LIKE: ClassVar[str]
    GIVEN: ClassVar[Mapping[str, Any]] = {}
    _factory: Callable[..., Any] | None = PrivateAttr(default=None)
    target: str
    args: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def _arguments(cls, section: Any) -> Any:
        """Move the keys that are arguments to `args`."""
        if not isinstance(section, Mapping):
            return section
        own = {key: value for key, value in section.items() if key in cls.model_fields} | cls.GIVEN
        if TARGET in section:
            own["target"] = section[TARGET]
        if args := {key: value for key, value in section.items() if key not in (*cls.model_fields, TARGET)}:
            own["args"] = {**own.get("args", {}), **args}
        check_path(own.get("target"), cls.WHERE, cls.LIKE)
        return own

    @model_validator(mode="after")
    def _find_factory(self, info: ValidationInfo) -> Self:
        """Look up the target, in a process that may import it; elsewhere it stays a name."""
        if find := (info.context or {}).get("find"):
            self._factory = find(self.target, self.WHERE)
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def factory(self) -> Any:
        """The target, or its name (recipe.factories.FactoryName) where this process does not import it."""
        return self._factory

    @property
    def is_imported(self) -> bool:
        """Whether this process may call the target."""
        return self._factory is not None and not getattr(self._factory, "is_name", False)


class UserModel(Section):
    """Keys that all models of users have.

    head: whether the output projection takes the recipe's `head` section; if not, it is not converted. attention:
    whether attention computes by the recipe's `dpa`; None: where the recipe mentions it. quantized_weights: whether
    converted modules hold their weights as operands only, with masters in the optimizer. init_noise: every initial
    weight is multiplied by 1 + init_noise * N(0, 1), for a null arm. loss: "package.module.function" of model and
    batch, which replaces the model's loss (models.batches); None: the model's own.
    """

    _loss: Callable[..., Any] | None = PrivateAttr(default=None)
    head: bool = False
    attention: bool | None = None
    quantized_weights: bool = False
    init_noise: Annotated[float, Field(ge=0)] = 0.0
    loss: str | None = None

    @model_validator(mode="after")
    def _find_loss(self, info: ValidationInfo) -> "UserModel":
        """Look up the loss, in a process that may import it; elsewhere it stays a name."""
        check_path(self.loss, "model.loss", "my_models.loss")
        if self.loss is not None and (find := (info.context or {}).get("find")):
            self._loss = find(self.loss, "model.loss")
        return self

    @property
    def loss_function(self) -> Callable[..., Any] | None:
        """The function of model and batch; None without one. A name where this process does not import it."""
        return self._loss


class HFModelConfig(UserModel):
    """A causal language model of Hugging Face, from a folder with config.json and safetensors, a .safetensors file with
    config.json beside it, or a .gguf file.

    architecture: the class of the model: the causal language model's, or its own, which config.json names.
    With pretrained=false, config.json alone is read, without trained weights. Nothing is downloaded, and no code of the
    folder is run. hash: the hash of its config and, if they are read, its weights; the sweep's command fills it in.
    """

    kind: Literal["hf"]
    path: str
    pretrained: bool = True
    architecture: Literal["causal", "own"] = "causal"
    hash: str | None = None


class FactoryModelConfig(Called, UserModel):
    """A model that the function `target` ("package.module.function", also given as model._target_) returns for `args`,
    which are all other keys. Only `hqsweep run` imports it."""

    WHERE, LIKE, GIVEN = f"model.{TARGET}", "my_models.build", {"kind": "factory"}
    kind: Literal["factory"]


def model_kind(section: Any) -> str:
    """The kind of a section: "gpt", "hf" or "factory". A section of another kind counts as "gpt", whose errors it
    gets."""
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
