"""Collectives on plain tensors whose results do not depend on the backend, nor on the number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.torch_private import foreach_copy_

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives by the names that torch has had since 2.13, or by those before."""


def begin(collective: Callable[..., Any], *tensors: Any, group: Any) -> Callable[[], None]:
    """collective(*tensors, group=group), begun on a stream of its own where the backend has one: the work that follows
    runs beside it. Calling what is returned waits, on GPUs on the stream. A trace waits at once."""
    if torch.compiler.is_compiling():
        collective(*tensors, group=group)
        return lambda: None
    work = collective(*tensors, group=group, async_op=True)
    return lambda: None if work is None else work.wait()


def maximum_(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Each float32 tensor of amaxes (>= 0) becomes, in place, the largest over the ranks; NaN counts as 0.

    One all-reduce of one flat buffer, for tensors of the same shapes on all ranks. Nothing waits.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat.nan_to_num_(0.0, posinf=torch.inf)  # backends keep a NaN or drop it by the order of ranks
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def largest_bytes_(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Each byte of each tensor becomes, in place, the largest over the ranks, in one all-reduce: where every rank has
    written its part of a tensor, and zeros elsewhere, all have the whole then."""
    if not tensors:
        return
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    for tensor, own in zip(tensors, flat.split([t.numel() * t.element_size() for t in tensors]), strict=True):
        tensor.copy_(own.clone().view(tensor.dtype).view(tensor.shape))


def gather_bytes(x: Tensor, group: Any = None) -> Tensor:
    """uint8 [ranks, ..., bytes of the last axis]: the bytes of every rank's x, of one shape and dtype on all.

    gloo takes no float8, and what travels as bytes comes back as it went.
    """
    return begin_gather_bytes(x, group)()


def begin_gather_bytes(x: Tensor, group: Any = None) -> Callable[[], Tensor]:
    """gather_bytes, begun."""
    own = x.contiguous().view(torch.uint8)
    every = torch.empty((dist.get_world_size(group), *own.shape), dtype=torch.uint8, device=own.device)
    wait = begin(all_gather, every.view(-1, *own.shape[1:]), own, group=group)

    def result() -> Tensor:
        wait()
        return every

    return result


def ordered_reduce_scatter(x: Tensor, group: Any = None) -> Tensor:
    """float32 [n, ...]: this rank's part of the sum over ranks of x [ranks * n, ...], added in float32 in rank order.

    The parts travel in x's dtype. A ring adds in an order that differs from part to part; this sum is that of one
    process that adds the slices one after the other. UserError for rows that the ranks do not divide.
    """
    world = dist.get_world_size(group)
    if x.dim() < 1 or x.shape[0] % world:
        raise UserError(f"ordered_reduce_scatter: {tuple(x.shape)} has no first axis that {world} ranks divide")
    arrived = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(arrived, x.contiguous(), group=group)
    first, *others = arrived.view(world, x.shape[0] // world, *x.shape[1:]).unbind()
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part.float()
    return total
