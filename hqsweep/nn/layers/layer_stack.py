"""A stack of transformer layers: a whole model's, or one pipeline stage's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hqsweep.nn.core.residual import Branch, add_branch
from hqsweep.nn.layers.stream_layer import StreamLayer, with_sum


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
