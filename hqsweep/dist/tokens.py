"""Rows of tokens over the ranks of a group: gathered, summed, and summed where each rank keeps its own.

A token axis of `lead` sequences lies split over ranks: a rank has [lead * t, C] of a whole [lead * W * t, C], tokens
[r * t, (r + 1) * t) of each sequence. Sums are of the values as they arrive, added in float32 in the order of ranks and
rounded once, on CPUs, and on GPUs under torch.use_deterministic_algorithms; otherwise the backend adds.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.dist import collectives


def gather_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Tensor:
    """[lead * t, C] of each rank -> the whole [lead * W * t, C], of any dtype whose bytes travel."""
    world = group.size()
    if world == 1:
        return x
    x = x.contiguous()
    whole = x.new_empty(world * x.shape[0], *x.shape[1:])
    collectives.all_gather(whole, x, group=group)
    return whole if lead == 1 else whole.unflatten(0, (world, lead, -1)).transpose(0, 1).flatten(0, 2)


def sum_rows(x: Tensor, group: ProcessGroup, lead: int = 1) -> Tensor:
    """[lead * W * t, C] of each rank -> this rank's rows [lead * t, C] of their sum."""
    world = group.size()
    if world == 1:
        return x
    if lead > 1:
        x = x.unflatten(0, (lead, world, -1)).transpose(0, 1).flatten(0, 2)
    x = x.contiguous()
    if in_order(x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return _added(received.unflatten(0, (world, -1)))
    own = x.new_empty(x.shape[0] // world, *x.shape[1:])
    collectives.reduce_scatter(own, x, group=group)
    return own


def sum_whole(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the x of all ranks, on each; x may be written."""
    world = group.size()
    if world == 1:
        return x
    if in_order(x):
        if x.dim() > 1 and x.shape[0] % world == 0:
            return gather_rows(sum_rows(x, group), group)
        parts = x.new_empty(world, *x.shape)
        collectives.all_gather(parts, x.contiguous()[None], group=group)
        return _added(parts)
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def in_order(x: Tensor) -> bool:
    """Whether sums of such tensors are formed in the order of ranks, with the same bits on any backend."""
    return not x.is_cuda or torch.are_deterministic_algorithms_enabled()


def _added(parts: Tensor) -> Tensor:
    """[W, ...] -> the sum in order, float32 rounded to the dtype of the parts."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
