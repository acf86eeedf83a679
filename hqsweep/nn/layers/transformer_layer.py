"""TransformerLayer: attention and MLP, each added to the residual stream.

StreamLayer has the residual stream and the recomputation that all layers share; a stack of layers is a whole model's,
or one pipeline stage's.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.attention.multihead_attention import MultiheadAttention
from hqsweep.nn.core.options import TransformerOptions
from hqsweep.nn.core.residual import Branch, StreamLayer, add_branch, with_sum
from hqsweep.nn.linear.mlp import LayerNormMLP
from hqsweep.recipe.argument import RecipeArgument, whole_recipe


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The residual stream x + branch [B, T, D], whose last sum the reader adds, and the routing of expert layers.

    balances: float32 [] per layer with experts; tokens: int64 [E] per layer with experts.
    """

    x: Tensor
    branch: Branch
    balances: list[Tensor]
    tokens: list[Tensor]


def _after(layer: nn.Module, x: Tensor, branch: Branch) -> tuple[Any, ...]:
    """Return (x, branch, *routing) after a layer.

    A wrapper around a layer (torch's checkpoint_wrapper, torch.compile) also has the layer's methods. They would skip
    the wrapper, so it is called instead.
    """
    if isinstance(layer, StreamLayer):
        return layer.residual(x, branch)
    return with_sum(layer(add_branch(x, branch)))


def through(layers: Iterable[nn.Module], x: Tensor) -> Stream:
    """Return the Stream of x [B, T, D] after TransformerLayers and MoELayers."""
    branch, balances, tokens = None, [], []
    for layer in layers:
        x, branch, *routed = _after(layer, x, branch)
        if routed:
            balances.append(routed[0])
            tokens.append(routed[1])
    return Stream(x=x, branch=branch, balances=balances, tokens=tokens)


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
