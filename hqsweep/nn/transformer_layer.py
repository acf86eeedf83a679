"""TransformerLayer: attention and MLP, each added to the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.layernorm_mlp import LayerNormMLP
from hqsweep.nn.multihead_attention import MultiheadAttention
from hqsweep.recipe.schedule import AnyRecipe


class TransformerLayer(nn.Module):
    """x [B, T, D] -> x + attn(x), then x + mlp(x), where both begin with a norm; the residual stream keeps x's dtype.

    Named `name`.attn and `name`.mlp; `attention` are further options of MultiheadAttention.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        heads: int,
        *,
        name: str,
        recipe: AnyRecipe,
        activation: str = "swiglu",
        normalization: str = "RMSNorm",
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        **attention: Any,
    ) -> None:
        super().__init__()
        options = {"recipe": recipe, "normalization": normalization, "bias": bias, "dtype": dtype}
        self.attn = MultiheadAttention(dim, heads, name=f"{name}.attn", **options, **attention)
        self.mlp = LayerNormMLP(dim, ffn, name=f"{name}.mlp", activation=activation, **options)

    def forward(self, x: Tensor, checkpoint_core_attention: bool = False) -> Tensor:
        x = x + self.attn(x, checkpoint_core_attention).to(x.dtype)
        return x + self.mlp(x).to(x.dtype)
