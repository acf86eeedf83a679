"""Layers of a transformer one after the other, as a whole model runs them and each stage of a pipeline its own."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from hqsweep.nn.recompute import recomputed
from hqsweep.nn.residual import Branch
from hqsweep.nn.summed_gains import gains_summed_together


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The residual stream x + branch [B, T, D], whose last sum is left to whoever reads it, and what layers with
    experts said of their routing: `balances` float32 [] and `tokens` int64 [E] of each."""

    x: Tensor
    branch: Branch
    balances: list[Tensor]
    tokens: list[Tensor]


def through(layers: Iterable[nn.Module], x: Tensor, recompute: str) -> Stream:
    """x [B, T, D] through TransformerLayers and MoELayers. recompute: what backward computes again: "none", every
    "layer", or the core of "attention"."""
    branch, balances, tokens, layers = None, [], [], list(layers)
    with gains_summed_together(layers):
        for layer in layers:
            if recompute == "layer":  # each layer keeps its input alone: one sum, no branch beside it
                out = recomputed(layer, x)
                x, *routed = out if isinstance(out, tuple) else (out,)
            else:
                x, branch, *routed = layer.residual(x, branch, recompute == "attention")
            if routed:
                balances.append(routed[0])
                tokens.append(routed[1])
    return Stream(x=x, branch=branch, balances=balances, tokens=tokens)
