"""Operands of plain weights that ranks have gathered: each gather is quantized once, and its values are freed then.

Where forward and backward are in one gather, both operands are made of it at once, and kept as codes until torch shards
the weight again: 2.06 bytes an element for mxfp8 and 1.13 for nvfp4 in the place of 2. After a forward that nothing
repeats, the columnwise one alone is kept: 1.03 and 0.56 bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hqsweep.dist.gathered import GatheredWeight
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
    identity = (quantizer, call.dtype, key)
    cached = gathering.kept(direction, identity)
    if cached is not None:
        return cached
    served = gathering.served(direction)
    if len(served) > 1 and not (needs_column and _are_cacheable(call, quantizer)):
        return getattr(make([direction]), direction)
    if len(served) > 1:
        operands = make(DIRECTIONS, "codes")
        for name in DIRECTIONS:
            if name != direction or gathering.is_read_again(name):
                gathering.keep(name, identity, getattr(operands, name))
    else:
        operands = make([direction])
    if type(quantizer) is HybridQuantizer and not (_are_values(quantizer, served) or call.context.probe):
        for weight in weights:
            weight.gathering.give_up()
    return getattr(operands, direction)


def _are_cacheable(call: Any, quantizer: HybridQuantizer) -> bool:
    """Whether operands may be kept between passes: those of one matrix, whose scales are functions of its values, and
    whose codes are not the values themselves."""
    alone = call.splits is None and type(quantizer) is HybridQuantizer and not quantizer.delayed
    return alone and not _are_values(quantizer, DIRECTIONS) and not call.context.probe


def _are_values(quantizer: HybridQuantizer, directions: tuple[Direction, ...]) -> bool:
    """Whether an operand may be the values themselves, in the memory that they have."""
    return any(getattr(quantizer, direction).high_precision for direction in directions)
