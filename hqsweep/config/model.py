"""The section `model` of the config, and the modules that follow from it, without building one."""

from typing import Annotated

from pydantic import Field, model_validator

from hqsweep.config.types import Count, Index, Positive, Section
from hqsweep.errors import UserError
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.validate import GemmModule, attention_module, grouped_linear_module, linear_module

Shape = tuple[str, int, int]
"""Name, in_features and out_features of a linear."""


class ModelConfig(Section):
    """A GPT: RMSNorm, RoPE, SwiGLU; ffn is the hidden width of the SwiGLU, None for 8/3 of dim. With quantized_weights
    linears hold operands only, and masters live in the optimizer. init_noise: train.loop.perturb, for a null arm.

    With experts, the MLPs from layer first_moe_layer on are mixtures, in which each token takes top_k of them."""

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
        return self


def ffn_width(config: ModelConfig) -> int:
    """Hidden width of SwiGLU: config.ffn, or 8/3 of dim rounded up to a multiple of 32."""
    return config.ffn or -(-8 * config.dim // (3 * 32)) * 32


def expert_width(config: ModelConfig) -> int:
    """Hidden width of each expert: config.expert_ffn, or ffn_width over top_k, so that a token costs what it does in a
    dense model, rounded up to a multiple of 32."""
    return config.expert_ffn or -(-ffn_width(config) // (config.top_k * 32)) * 32


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Whether the MLP of a layer is a mixture."""
    return config.experts > 0 and layer >= config.first_moe_layer


def linear_shapes(config: ModelConfig, vocab_size: int) -> list[Shape]:
    """Every linear of the GPT but grouped ones, in order, without building it."""
    dim, shapes = config.dim, []
    for i in range(config.layers):
        shapes += [(f"layers.{i}.attn.qkv", dim, 3 * dim), (f"layers.{i}.attn.proj", dim, dim)]
        if not has_experts(config, i):
            shapes += _mlp_shapes(f"layers.{i}.mlp", dim, ffn_width(config))
        elif config.shared_expert:
            shapes += _mlp_shapes(f"layers.{i}.mlp.shared", dim, expert_width(config))
    return [*shapes, (HEAD, dim, vocab_size)]


def grouped_shapes(config: ModelConfig) -> list[Shape]:
    """Every grouped linear of the GPT, with the features of each expert, in order."""
    layers, width = (i for i in range(config.layers) if has_experts(config, i)), expert_width(config)
    return [shape for i in layers for shape in _mlp_shapes(f"layers.{i}.mlp", config.dim, width)]


def _mlp_shapes(name: str, dim: int, hidden: int) -> list[Shape]:
    return [(f"{name}.fc1", dim, 2 * hidden), (f"{name}.fc2", hidden, dim)]


def gemm_modules(config: ModelConfig, vocab_size: int, batch: int, context: int) -> list[GemmModule]:
    """Every module of the GPT with matrix products, for a step of batch x context tokens, without building it."""
    linears = [linear_module(*shape, batch * context) for shape in linear_shapes(config, vocab_size)]
    linears += [grouped_linear_module(*shape) for shape in grouped_shapes(config)]
    head_dim = config.dim // config.heads
    return linears + [attention_module(f"layers.{i}.attn.dpa", head_dim, context) for i in range(config.layers)]
