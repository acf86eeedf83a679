"""Held quantized weights after copies, moves and checkpoints, and their amaxes over the ranks of fully_shard."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.module import PARTS, quantized_modules
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.linears import Linear
from hqsweep.parallel.wire.collectives import maximum_
from hqsweep.parallel.wire.local import group_of_shards, is_spread
from hqsweep.parallel.wire.local import local as stored
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.torch_private import foreach_zero_


def link_held(model: nn.Module) -> None:
    """Link held quantized weights, and their shards, to the present states of their modules."""
    for weights, states in _weights_and_states(model):
        link_states(list(map(stored, weights)), states)  # and not a view of the part


@torch.no_grad()
def share_amaxes(model: nn.Module) -> None:
    """Give every rank the amaxes of held experts that another rank of fully_shard writes.

    Only the writing rank has their history, while statistics of the whole need it. All ranks call it, after each
    write.
    """
    amaxes: dict[Any, list[Tensor]] = {}
    for weights, states in _weights_and_states(model):
        own = stored(weights[0])
        if not (isinstance(own, GroupedTensor) and own.quantizer.delayed and is_spread(weights[0])):
            continue
        written = range(own.metadata.content.first, own.metadata.content.first + own.experts)
        for expert, of_expert in states.named_children():
            slot = [state.amax for name, state in of_expert.items() if name.startswith("weight_")]
            if int(expert) not in written:
                foreach_zero_(slot)
            amaxes.setdefault(group_of_shards(weights[0]), []).extend(slot)
    for group, every in amaxes.items():
        maximum_(every, group)


def _weights_and_states(model: nn.Module) -> Iterator[tuple[Sequence[Tensor], DelayedStates | ExpertStates]]:
    """Yield the weights of each linear and of experts, also of a converted model, with the states of their module."""
    for module in quantized_modules(model):
        if isinstance(module, Linear):
            yield [module.weight], module.states
        elif hasattr(module, "weights"):  # a GroupedLinear
            yield module.weights, module.states
    for module in model.modules():
        for part in module.__dict__.get(PARTS, ()):
            if getattr(part, "weight_name", None):
                yield [getattr(module, part.weight_name)], part.states
