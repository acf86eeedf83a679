"""Gradients of the gains of norms over ranks that each have some of the tokens: one sum for all layers of a model.

A norm that sums its own does so before its backward hands on the gradient of its input, which the next matrix sends to
other ranks: a collective of a few microseconds that everything waits for. Here the layers' gains go through one
function of autograd before the first layer runs, so that its backward, the sum, comes after that of the first layer.
Every element is the same sum.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hqsweep.parallel.fsdp.fsdp_state import groups_of
from hqsweep.parallel.overlap.shared_linear import local, sum_gradients

_TOGETHER: dict[int, Tensor] = {}
"""The id of a parameter -> what its module reads in its place."""


@contextmanager
def gains_summed_together(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A context for a forward of the layers, whose gains then get their gradients by one sum. Layers that fully_shard
    gathers keep sums of their own: their parameters are others within their forward."""
    modules = [module for layer in layers for module in layer.modules()]
    norms = [module for module in modules if getattr(module, "tokens_group", None) is not None]
    gains = [p for norm in norms for p in norm.parameters(recurse=False) if p.requires_grad]
    traced = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if not gains or traced or any(map(groups_of, modules)) or len({norm.tokens_group for norm in norms}) > 1:
        yield
        return
    read = sum_gradients(list(map(local, gains)), norms[0].tokens_group)
    _TOGETHER.update(zip(map(id, gains), read, strict=True))
    try:
        yield
    finally:
        for gain in gains:
            _TOGETHER.pop(id(gain), None)


def summed_together(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter, whose gradient is summed with those of others; None for one that has a sum of
    its own."""
    return _TOGETHER.get(id(parameter))
