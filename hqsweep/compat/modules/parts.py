"""The part of a weight that each rank has: every rank draws the whole weight alike, and keeps its part as a tensor of
its own, plain or held quantized."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.compat.quantizer import te_device_type
from hqsweep.errors import UserError
from hqsweep.parallel.shared.call import LinearShare
from hqsweep.parallel.shared.held import become_part
from hqsweep.quant.tensor import HybridQuantizedTensor


def drawn_whole(draw: Callable[[Tensor], Any] | None, inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    """A weight [outputs, inputs] in dtype by `draw`, or as Linear draws it without, in float32."""
    whole = torch.empty(outputs, inputs, dtype=torch.float32 if draw is None else dtype)
    with torch.no_grad():
        if draw is None:
            nn.init.normal_(whole, std=1 / math.sqrt(inputs))
        else:
            draw(whole)
    return whole


def part_of(whole: Tensor, mode: str | None, rank: int, ranks: int, pieces: int = 1) -> Tensor:
    """A rank's part of a weight [N, K]: columns ("row"), or rows of each piece; pieces lie one below the other."""
    if mode == "row":
        return whole.chunk(ranks, 1)[rank]
    return whole.unflatten(0, (pieces, -1)).chunk(ranks, 1)[rank].flatten(0, 1)


def link_part(name: str, weight: Tensor, parallel: LinearShare | None) -> None:
    """Make a held weight this rank's part, so that writes have the bytes of the whole. Nothing changes where the weight
    is plain, or ranks do not share it. UserError, with the module's name, for a part that cuts a block."""
    if parallel is None or not isinstance(weight, HybridQuantizedTensor):
        return
    if weight.part is not None and weight.part.group is parallel.group:
        return
    try:
        become_part(weight, parallel.part_of("weight"))
    except UserError as error:
        raise UserError(f"{name}: weight: {error}") from None


@torch.no_grad()
def write_part(weight: Tensor, values: Tensor) -> None:
    """Give a weight its first values; one that is held quantized draws the random bits of its first writing."""
    if isinstance(weight, HybridQuantizedTensor):
        weight.quantize_(values, key=weight.metadata.key)
    else:
        weight.copy_(values)


def materialize(module: nn.Module) -> None:
    """Give memory on te_device_type() to the parameters of a module that was built on the meta device."""
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device=te_device_type())


def ranks_of(tp_size: int, tp_group: Any) -> int:
    """How many ranks share a module."""
    return tp_size if tp_group is None else tp_group.size()


def check_ranks(name: str, ranks: int, parallel: LinearShare | None) -> None:
    """UserError for a call of a module that ranks are to share before it knows which."""
    if parallel is None:
        raise UserError(
            f"{name}: tp_size={ranks}, and no tp_group says which ranks these are; give tp_group, or call"
            " set_tensor_parallel_group before the module"
        )
