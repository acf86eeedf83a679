"""The input of a row-parallel linear, written and quantized by the rows of each rank.

Rows of the other ranks come first, so that their products travel while this rank's rows are computed. All bits equal
the bits of the whole input, if scales and random bits belong to blocks that no cut divides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hqsweep.nn.core.guards import top_hooks
from hqsweep.ops.model.activation import INPUTS, activation_into
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.shards.shard_part import Part, is_alone
from hqsweep.parallel.shared.call import Exchange, OneOperand, RankRows, SharedCall, hides, span
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, OperandParts


@dataclass(eq=False)
class Turns:
    """Writes a linear's input, by the rows of each rank."""

    part: Part
    """How ranks share the rows of the output."""
    write: Callable[[int], None] | None = None
    """Writes the rows of one rank."""
    by_halves: bool = False
    """As in shared.call.RankRows."""


@dataclass(kw_only=True, eq=False)
class OperandsInTurn:
    """The operands of an input whose rows are quantized just before they are multiplied."""

    part: Part
    rows: int
    """The rows of each rank."""
    quantize: Callable[[int], HybridOperand]
    """Returns the operands of one rank's rows."""
    by_halves: bool = False
    """As in RankRows."""
    whole: Callable[[], Operand] | None = None
    """Returns the columnwise operand of all rows, after they are written; None: quantize() gives it for each rank."""
    columns: dict[int, Operand | None] = field(default_factory=dict, init=False)

    @property
    def rowwise(self) -> RankRows:
        """The rowwise operand by the rows of each rank."""
        return RankRows(part=self.part, rows=self.rows, of_rank=self._of_rank, by_halves=self.by_halves)

    @property
    def columnwise(self) -> Operand | OperandParts | None:
        """The columnwise operand of all rows, after their product."""
        if self.whole is not None:
            return self.whole()
        parts = [self.columns[rank] for rank in sorted(self.columns)]
        return None if parts[0] is None else OperandParts(parts=parts)

    def _of_rank(self, rank: int) -> OneOperand:
        operands = self.quantize(rank)
        self.columns[rank] = operands.columnwise
        return operands.rowwise


def part_in_turn(
    exchange: Exchange | None, quantizer: HybridQuantizer, gemm: str, like: Tensor, width: int
) -> Part | None:
    """Return how ranks share the output's rows of a linear whose input [M, width] can be written rank by rank.

    None if the input must be written as a whole. like: has the rows and the device of the input.
    """
    traced = torch.compiler.is_compiling()  # which waits for every collective at once
    if exchange is None or traced or gemm == "native" or not exchange.splits_tokens("output"):
        return None
    part, features = exchange.parts["output"], exchange.parts["input"]
    rows = len(like) // part.group.size()
    alone = all(is_alone(quantizer, (rows, width), each, "codes", "codes") for each in (part, features))
    return part if part.runs == 1 and alone and hides(like[:rows]) else None


def in_turn(call: SharedCall, turns: Turns, x: Tensor, *, rowwise: Output, columnwise: Output | None) -> OperandsInTurn:
    """Return the operands of the input x [M, K] of a call, which `turns` writes."""
    rows = len(x) // turns.part.group.size()
    is_whole = columnwise is not None and call.quantizer("input").columnwise.high_precision  # x itself, and no parts
    of_rank = None if is_whole else columnwise

    def quantize(rank: int) -> HybridOperand:
        turns.write(rank)
        return call.quantize("input", x[slice(*span(rank, rows))], rowwise=rowwise, columnwise=of_rank)

    whole = (lambda: call.quantize("input", x, columnwise=columnwise).columnwise) if is_whole else None
    return OperandsInTurn(part=turns.part, rows=rows, quantize=quantize, by_halves=turns.by_halves, whole=whole)


def activated_in_turn(
    call: SharedCall, z: Tensor, kind: str, *, rowwise: Output, columnwise: Output | None
) -> HybridOperand | OperandsInTurn:
    """Return the operands of activation(z) [M, K], the input of a call; rank by rank if part_in_turn allows it."""
    quantizer, width = call.quantizer("input"), z.shape[1] // INPUTS[kind]
    part = part_in_turn(call.exchange, quantizer, call.gemm, z, width)
    if part is None:
        return call.quantize_activated("input", z, None, kind, rowwise=rowwise, columnwise=columnwise)
    rows = len(z) // part.group.size()
    if columnwise is not None and quantizer.columnwise.high_precision:
        h = z.new_empty(len(z), width)
        of_rank = [slice(*span(rank, rows)) for rank in range(part.group.size())]
        turns = Turns(part, lambda rank: activation_into(h[of_rank[rank]], z[of_rank[rank]], kind), True)
        return in_turn(call, turns, h, rowwise=rowwise, columnwise=columnwise)

    def quantize(rank: int) -> HybridOperand:
        own = z[slice(*span(rank, rows))]
        return call.quantize_activated("input", own, None, kind, rowwise=rowwise, columnwise=columnwise)

    return OperandsInTurn(part=part, rows=rows, quantize=quantize, by_halves=True)


def is_hooked() -> bool:
    """Return whether hooks of saved tensors replace tensors that autograd saves now, for example to offload them.

    Without hooks a saved tensor may still be written, and backward reads it from the same memory.
    """
    return top_hooks() is not None
