"""Operands of plain weights that ranks have gathered: each gather is quantized once, and its values are freed then.

Where forward and backward are in one gather, both operands are made of it at once, and kept as codes until torch shards
the weight again: 2.06 bytes an element for mxfp8 and 1.13 for nvfp4 in the place of 2. After a forward that nothing
repeats, the columnwise one alone is kept: 1.03 and 0.56 bytes. Where backward gathers anew, each pass makes the one
that it reads, of square tiles, too: codes that served both would have to be kept between the passes, and sharding again
is there to keep nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hqsweep.parallel.fsdp.gathered_weight import GatheredWeight
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand


def gathered_operand(
    call: Any,
    weights: Sequence[GatheredWeight],
    direction: Direction,
    make: Callable[..., HybridOperand],
    *,
    needs_column: bool,
) -> Operand | Any:
    """The operand of one direction of weights that are GatheredWeights, in a LinearCall.

    make(directions[, output]) quantizes them; needs_column: whether the columnwise one is read, too."""
    quantizer, gathering = call.quantizer("weight"), weights[0].gathering
    key = call.key("weight") if quantizer.reads_key else None
    views = tuple((weight.shape, weight.value.stride(), weight.value.storage_offset()) for weight in weights)
    identity = (quantizer, call.dtype, key, views)
    cached = gathering.kept(direction, identity)
    if cached is not None:
        return cached
    served = gathering.served(direction)
    if len(served) > 1 and not _are_cacheable(call, quantizer, needs_column):
        return getattr(make([direction]), direction)
    if len(served) > 1:
        wanted = DIRECTIONS if needs_column else [direction]
        operands = make(wanted, "codes")
        for name in wanted:
            if name != direction or gathering.is_read_again(name):
                gathering.keep(name, identity, getattr(operands, name))
    else:
        operands = make([direction])
    if type(quantizer) is HybridQuantizer and not (_are_values(quantizer, served) or call.context.probe):
        for weight in weights:
            weight.gathering.give_up()
    return getattr(operands, direction)


def _are_cacheable(call: Any, quantizer: HybridQuantizer, needs_column: bool) -> bool:
    """Whether operands may be kept between passes: those whose scales are functions of the values, and whose codes are
    not the values themselves; and not in an evaluation, as the training forward that may follow it in the same gather
    reads the columnwise one."""
    of_values = type(quantizer) is HybridQuantizer and not quantizer.delayed
    is_read = needs_column or call.grad
    return is_read and of_values and not _are_values(quantizer, DIRECTIONS) and not call.context.probe


def _are_values(quantizer: HybridQuantizer, directions: tuple[Direction, ...]) -> bool:
    """Whether an operand may be the values themselves, in the memory that they have."""
    return any(getattr(quantizer, direction).high_precision for direction in directions)
