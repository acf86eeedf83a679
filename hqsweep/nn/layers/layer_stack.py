"""Layers of a transformer one after the other, as a whole model runs them and each stage of a pipeline its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hqsweep.nn.core.residual import Branch, add_branch
from hqsweep.nn.layers.stream_layer import StreamLayer, with_sum


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The residual stream x + branch [B, T, D], whose last sum is left to whoever reads it, and what layers with
    experts said of their routing: `balances` float32 [] and `tokens` int64 [E] of each."""

    x: Tensor
    branch: Branch
    balances: list[Tensor]
    tokens: list[Tensor]


def _after(layer: nn.Module, x: Tensor, branch: Branch) -> tuple[Any, ...]:
    """(x, branch) after a layer, and what it says of its routing. A module around one, as torch's checkpoint_wrapper
    and torch.compile make it, has the layer's methods, but they would leave out what it adds."""
    if isinstance(layer, StreamLayer):
        return layer.residual(x, branch)
    return with_sum(layer(add_branch(x, branch)))


def through(layers: Iterable[nn.Module], x: Tensor) -> Stream:
    """x [B, T, D] through TransformerLayers and MoELayers."""
    branch, balances, tokens = None, [], []
    for layer in layers:
        x, branch, *routed = _after(layer, x, branch)
        if routed:
            balances.append(routed[0])
            tokens.append(routed[1])
    return Stream(x=x, branch=branch, balances=balances, tokens=tokens)
