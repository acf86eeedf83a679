"""Collectives on plain tensors, whose results depend neither on the backend nor on the number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.torch_private import foreach_copy_

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives under their names since torch 2.13, or under the earlier names."""


def begin(collective: Callable[..., Any], *tensors: Any, group: Any) -> Callable[[], None]:
    """Start collective(*tensors, group=group), and return a function that waits for it.

    The collective runs on its own stream where the backend has one, beside the work that follows. On GPUs the stream
    waits, not the host. While torch.compile traces, the collective is waited for at once.
    """
    if torch.compiler.is_compiling():
        collective(*tensors, group=group)
        return lambda: None
    work = collective(*tensors, group=group, async_op=True)
    return lambda: None if work is None else work.wait()


def maximum_(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace float32 tensors of amaxes (>= 0), in place, by their maximum over the ranks; NaN counts as 0.

    One all-reduce of one flat buffer. All ranks give tensors of the same shapes. The host does not wait.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat.nan_to_num_(0.0, posinf=torch.inf)  # whether backends keep a NaN depends on the order of ranks
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def largest_bytes_(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace each byte of each tensor, in place, by its maximum over the ranks, in one all-reduce.

    Where every rank has written its part of a tensor, and zeros elsewhere, all ranks then have the whole.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    for tensor, own in zip(tensors, flat.split([t.numel() * t.element_size() for t in tensors]), strict=True):
        tensor.copy_(own.clone().view(tensor.dtype).view(tensor.shape))


def gather_bytes(x: Tensor, group: Any = None) -> Tensor:
    """uint8 [ranks, ..., bytes of the last axis]: the bytes of every rank's x. All ranks give one shape and dtype.

    gloo takes no float8, but moves bytes unchanged.
    """
    return begin_gather_bytes(x, group)()


def begin_gather_bytes(x: Tensor, group: Any = None) -> Callable[[], Tensor]:
    """Start gather_bytes; the returned function waits and gives its result."""
    own = x.contiguous().view(torch.uint8)
    every = torch.empty((dist.get_world_size(group), *own.shape), dtype=torch.uint8, device=own.device)
    wait = begin(all_gather, every.view(-1, *own.shape[1:]), own, group=group)

    def result() -> Tensor:
        wait()
        return every

    return result


def ordered_reduce_scatter(x: Tensor, group: Any = None) -> Tensor:
    """float32 [n, ...]: this rank's part of the sum over ranks of x [ranks * n, ...], added in float32 in order of
    ranks.

    The parts travel in x's dtype. The sum has the bits of one process that adds the slices one after the other; a ring
    adds each part in another order. UserError for rows that the ranks do not divide.
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
