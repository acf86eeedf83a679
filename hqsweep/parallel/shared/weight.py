"""Weights of norms, embeddings and routers over ranks, and one sum for the gradients of all layers' gains.

If each rank has some of the tokens, gradients of gains are summed over ranks. A norm that sums its own gain does so
before it passes on the gradient of its input: a collective of a few microseconds in the critical path. Here all gains
pass through one autograd function before the first layer. Its backward, the sum, runs after the first layer's backward.
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
"""id of a parameter -> the tensor that its module reads instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedWeight:
    """How ranks share a module's parameters (hqsweep.nn.core.wire.WeightRanks). It cannot be copied, because a group
    cannot."""

    tokens: ProcessGroup | None = None
    """The ranks that each have some of the tokens. Gradients of parameters are summed over them."""
    part: Part | None = None
    """This rank's part of the weight; None: each rank has all of it."""
    split: int | None = None
    """The axis of tokens [B, T] along which each rank takes its part of an embedding's rows; None: it takes all."""

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, as forward reads it."""
        if self.tokens is None:
            return local(parameter)
        together = _TOGETHER.get(id(parameter))
        return sum_gradients([local(parameter)], self.tokens)[0] if together is None else together

    def __deepcopy__(self, memo: Any) -> "SharedWeight":
        return self


@contextmanager
def gains_summed_together(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A context for a forward of the layers. One sum then gives all gains their gradients.

    Layers gathered by fully_shard sum their own gains, since their parameters are other objects within forward.
    """
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
