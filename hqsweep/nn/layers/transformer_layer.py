"""TransformerLayer: attention and MLP, each added to the residual stream."""

from contextlib import nullcontext

import torch
from torch import Tensor

from hqsweep.nn.attention.multihead_attention import MultiheadAttention
from hqsweep.nn.core.options import TransformerOptions
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.layers.stream_layer import StreamLayer
from hqsweep.nn.linear.layernorm_mlp import LayerNormMLP
from hqsweep.recipe.argument import RecipeArgument, whole_recipe


class TransformerLayer(StreamLayer):
    """x [B, T, D] -> x + attn(x), then x + mlp(x), both starting with a norm. The residual stream keeps x's dtype.

    Submodules are named `name`.attn and `name`.mlp. If recipe is a section, or its text, it applies to the linears of
    both.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        heads: int,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype = torch.bfloat16,
        options: TransformerOptions = TransformerOptions(),
    ) -> None:
        super().__init__()
        shared = {"recipe": whole_recipe(recipe, name), "bias": options.bias, "dtype": dtype, "options": options}
        self.attn = MultiheadAttention(dim, heads, name=f"{name}.attn", **shared)
        self.mlp = LayerNormMLP(dim, ffn, name=f"{name}.mlp", **shared)

    def _residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool) -> tuple[Tensor, Branch]:
        ranks = self.attn.qkv.parallel
        with nullcontext() if ranks is None else ranks.layer_call(self, x.shape[:-1]):
            x, branch = self.attn.added(x, branch, checkpoint_core_attention)
            return self.mlp.added(x, branch)
