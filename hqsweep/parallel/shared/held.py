"""Held weights over ranks: one rank's part of a matrix, and held weights after copies, moves and checkpoints.

hold_part cuts the part from a whole that every rank has; become_part takes a part that the rank has made by itself.
Amaxes of held weights are joined over the ranks of fully_shard.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.module import PARTS, quantized_modules
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.linears import Linear
from hqsweep.parallel.shards.shard_part import Part, check_part
from hqsweep.parallel.wire.collectives import maximum_
from hqsweep.parallel.wire.local import group_of_shards, is_spread
from hqsweep.parallel.wire.local import local as stored
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import DIRECTIONS
from hqsweep.quant.tensor import INIT_VAL, HybridQuantizedTensor
from hqsweep.torch_private import foreach_zero_


def hold_part(x: HybridQuantizedTensor, part: Part) -> HybridQuantizedTensor:
    """This rank's part of a held matrix x [rows, cols], or of each member of a group, in its own memory. Every rank has
    the whole x.

    Codes and scales have the bytes that they have in the whole. Later writes keep to this, and are collectives: amaxes
    are the largest over all ranks, random bits are keyed by the place in the whole. A preserved initial value is cut
    likewise.

    UserError for parts that cut a block, and for pieces of a quantizer that both draws bits and counts steps.
    """
    if isinstance(x, GroupedTensor):
        own = GroupedTensor.of([hold_part(member, part) for member in x.members]).set_key(x.metadata.key)
        own.states, own.part = x.states, part
        return own
    meta, shape = x.metadata, list(x.shape)
    if meta.place is not None:
        raise UserError(f"a weight held in {x.quantizer} is a shard already, of which ranks cannot take parts")
    shape[part.axis] //= part.group.size()
    _check(x, shape, part)
    options = {"dtype": x.dtype, "source_dtype": x.source_dtype, "device": x.device, "directions": meta.directions}
    own = type(x).empty(shape, x.quantizer, key=meta.key, **options)
    with torch.no_grad():
        for direction, name in meta.stored:
            axis = part.axis if direction == "rowwise" else 1 - part.axis
            buffer, layout = getattr(x, direction).buffers[name], getattr(x.quantizer, direction).layout[name]
            cut = (layout.rows, layout.cols)[axis] != WHOLE
            getattr(own, direction).buffers[name].copy_(part.own(buffer, axis) if cut else buffer)
        if x.high_precision_init_val is not None:
            setattr(own, INIT_VAL, part.own(x.high_precision_init_val, part.axis).clone())
    own.states, own.part = x.states, part
    return own


def become_part(x: HybridQuantizedTensor, part: Part) -> None:
    """Turn x, in the shape of this rank's part, into that part of the whole matrix, or of each member of a group.

    Later writes give the bytes of the whole, as with hold_part(); the present bytes stay. UserError as in hold_part.
    """
    _check(x, x.shape[-2:], part)
    x.part = part


def _check(x: HybridQuantizedTensor, shape: Sequence[int], part: Part) -> None:
    """UserError for a part of that shape that the quantizer of x cannot hold."""
    meta = x.metadata
    wanted = {d: "codes" if d in meta.directions else None for d in DIRECTIONS}
    check_part(x.quantizer, torch.empty(shape, device="meta"), part, **wanted)
    if part.runs > 1 and x.quantizer.stochastic and x.quantizer.delayed:
        raise UserError(
            f"a weight held in {x.quantizer} draws bits and counts steps, and has {part.runs} pieces on each rank; take"
            " formats without one of these"
        )


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
