"""The section `model` of the config."""

from typing import Annotated

from pydantic import Field, model_validator

from hqsweep.config.types import Count, Index, Positive, Section
from hqsweep.errors import UserError


class ModelConfig(Section):
    """A GPT: RMSNorm, RoPE, SwiGLU; ffn is the hidden width of the SwiGLU, None for 8/3 of dim. With quantized_weights
    linears hold operands only, and masters live in the optimizer. init_noise: train.model.perturb, for a null arm.

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
