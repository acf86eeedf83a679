"""GPT: RMSNorm, rotary positions, SwiGLU, tied or untied head; every linear reads its quantizers from the recipe.

The residual stream and norms are FP32; linears read and write train.dtype. Attention that the recipe leaves in high
precision is FP32 on CPU, train.dtype on CUDA. Shapes: B batch, T context, D dim, V vocabulary.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.nn.linear import Linear
from hqsweep.nn.module import gemm_options, section_of
from hqsweep.nn.norm import Norm
from hqsweep.nn.recompute import recomputed
from hqsweep.nn.transformer_layer import TransformerLayer
from hqsweep.nn.weight import QuantizedWeight
from hqsweep.quant.recipe import HEAD
from hqsweep.quant.schedule import AnyRecipe
from hqsweep.quant.validate import GemmModule, attention_module, linear_module

if TYPE_CHECKING:
    from hqsweep.config import ModelConfig

Recompute = Literal["none", "layer", "attention"]
EMBEDDING_STD = 0.02


def ffn_width(config: "ModelConfig") -> int:
    """Hidden width of SwiGLU: config.ffn, or 8/3 of dim rounded up to a multiple of 32."""
    return config.ffn or -(-8 * config.dim // (3 * 32)) * 32


def linear_shapes(config: "ModelConfig", vocab_size: int) -> list[tuple[str, int, int]]:
    """(name, in_features, out_features) of every linear of the GPT, in order, without building it."""
    dim, hidden, shapes = config.dim, ffn_width(config), []
    for i in range(config.layers):
        shapes += [
            (f"layers.{i}.attn.qkv", dim, 3 * dim),
            (f"layers.{i}.attn.proj", dim, dim),
            (f"layers.{i}.mlp.fc1", dim, 2 * hidden),
            (f"layers.{i}.mlp.fc2", hidden, dim),
        ]
    return [*shapes, (HEAD, dim, vocab_size)]


def gemm_modules(config: "ModelConfig", vocab_size: int, batch: int, context: int) -> list[GemmModule]:
    """Every module of the GPT with matrix products, for a step of batch x context tokens, without building it."""
    linears = [linear_module(*shape, batch * context) for shape in linear_shapes(config, vocab_size)]
    head_dim = config.dim // config.heads
    return linears + [attention_module(f"layers.{i}.attn.dpa", head_dim, context) for i in range(config.layers)]


class Embedding(QuantizedWeight):
    """Tokens [...] -> rows [..., D] of a table [V, D]."""

    module_type = "embedding"

    def __init__(self, vocab_size: int, dim: int, name: str, recipe: AnyRecipe) -> None:
        super().__init__()
        self.name, self.quantizers = name, section_of(recipe, self.module_type, name)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.quantized_weight())


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, V] in FP32. set_recipe(model, other) changes the recipe that it is built with.

    recompute: what backward computes again instead of keeping it: "none", every "layer", or the core of "attention".
    """

    def __init__(
        self,
        config: "ModelConfig",
        vocab_size: int,
        recipe: AnyRecipe,
        dtype: torch.dtype,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.recompute = recompute
        recipe = recipe.for_layers(range(config.layers))
        self.embedding = Embedding(vocab_size, config.dim, "embedding", recipe)
        sizes, options = (config.dim, ffn_width(config), config.heads), {"recipe": recipe, "dtype": dtype}
        self.layers = nn.ModuleList(
            TransformerLayer(*sizes, name=f"layers.{i}", rope_base=config.rope_base, **options)
            for i in range(config.layers)
        )
        self.norm = Norm(config.dim, name="norm", recipe=recipe)
        self.head = Linear(config.dim, vocab_size, **gemm_options(recipe, "linear", HEAD), dtype=dtype)
        self._initialise(config)

    def _initialise(self, config: "ModelConfig") -> None:
        """Residual projections shrink with depth (GPT-2); an untied head starts at zero, so the first loss is ln V."""
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            for layer in self.layers:
                for linear in (layer.attn.proj, layer.mlp.fc2):
                    linear.weight.mul_((2 * config.layers) ** -0.5)
            self.head.weight.zero_()
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = recomputed(layer, x) if self.recompute == "layer" else layer(x, self.recompute == "attention")
        return self.head(self.norm(x)).float()

    def linears(self) -> Iterator[Linear]:
        """All linears in order, the head last."""
        return (module for module in self.modules() if isinstance(module, Linear))
