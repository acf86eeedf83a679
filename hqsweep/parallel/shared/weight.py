"""Weights that are no GEMM operands, of norms, embeddings and routers, as ranks share them; and one sum for the
gradients of the gains of all layers, where each rank has some of the tokens.

A norm that sums its own does so before its backward hands on the gradient of its input, which the next matrix sends to
other ranks: a collective of a few microseconds that everything waits for. Here the layers' gains go through one
function of autograd before the first layer runs, so that its backward, the sum, comes after that of the first layer.
Every element is the same sum.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.parallel.fsdp.fsdp_state import groups_of
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared.tokens import local, sum_gradients

_TOGETHER: dict[int, Tensor] = {}
"""The id of a parameter -> what its module reads in its place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedWeight:
    """How ranks share a module's parameters (hqsweep.nn.core.wire.WeightRanks). It has no copies, as a group has
    none."""

    tokens: ProcessGroup | None = None
    """The ranks that each have some of the tokens, over which the gradients of parameters are summed."""
    part: Part | None = None
    """This rank's part of the weight; None: each rank has all of it."""
    split: int | None = None
    """The axis of tokens [B, T] along which each rank takes its part of an embedding's rows; None: it takes all."""

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, as forward reads it."""
        if self.tokens is None:
            return local(parameter)
        together = _TOGETHER.get(id(parameter))
        return sum_gradients([local(parameter)], self.tokens)[0] if together is None else together

    def __deepcopy__(self, memo: Any) -> "SharedWeight":
        return self


@contextmanager
def gains_summed_together(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A context for a forward of the layers, whose gains then get their gradients by one sum. Layers that fully_shard
    gathers keep sums of their own: their parameters are others within their forward."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    modules = [module for layer in layers for module in layer.modules()]
    ranks = {module: getattr(module, "parallel", None) for module in modules}
    norms = [module for module, own in ranks.items() if isinstance(own, SharedWeight) and own.tokens is not None]
    gains = [p for norm in norms for p in norm.parameters(recurse=False) if p.requires_grad]
    if not gains or any(map(groups_of, modules)) or len({ranks[norm].tokens for norm in norms}) > 1:
        yield
        return
    read = sum_gradients(list(map(local, gains)), ranks[norms[0]].tokens)
    _TOGETHER.update(zip(map(id, gains), read, strict=True))
    try:
        yield
    finally:
        for gain in gains:
            _TOGETHER.pop(id(gain), None)
