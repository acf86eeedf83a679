"""The exchanges of units of fully_shard: by copy engines (p2p_copy) within a machine, else by collectives.

torch calls these on its own streams. A collective there takes multiprocessors from the GEMMs beside it; a copy takes
none. Gradients are added in the order of ranks and rounded once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.ops.sum_parts import sum_parts
from hqsweep.parallel.wire import p2p_copy
from hqsweep.torch_private import fsdp_exchanges

DefaultAllGather, DefaultReduceScatter = fsdp_exchanges()
GATHERS = p2p_copy.Purpose("gather", slots=1, most=1 << 28)
SUMS = p2p_copy.Purpose("sum", slots=1, most=1 << 28)
"""One slot is enough: each exchange has arrived before the next begins, and ranks wait for each other as in a
collective."""


class Gather(DefaultAllGather):
    """The all_gather of a unit's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        rank, world = group.rank(), group.size()
        others = [other for other in range(world) if other != rank]
        arriving = p2p_copy.begin(dict.fromkeys(others, (input_tensor,)), group, purpose=GATHERS)
        if arriving is None:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        places = output_tensor.view(world, -1).view(torch.uint8)
        if input_tensor.data_ptr() != places[rank].data_ptr():
            places[rank].copy_(input_tensor.view(-1).view(torch.uint8))
        for other, message in zip(others, arriving(), strict=True):
            places[other].copy_(message)
        return None


class Sum(DefaultReduceScatter):
    """The reduce_scatter of a unit's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        rank, world = group.rank(), group.size()
        parts, arriving = input_tensor.view(world, -1), None
        if op == dist.ReduceOp.SUM:
            messages = {other: (parts[other],) for other in range(world) if other != rank}
            arriving = p2p_copy.begin(messages, group, purpose=SUMS)
        if arriving is None:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        received = arriving().view(parts.dtype).view(world - 1, 1, -1)
        sum_parts(parts[None], received, rank, out=output_tensor.view(1, -1))
        return None


def exchange_by_copies(unit: Any) -> None:
    """Have a unit of fully_shard exchange by Gather and Sum."""
    unit.set_custom_all_gather(Gather())
    unit.set_custom_reduce_scatter(Sum())
