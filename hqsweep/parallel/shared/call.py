"""SharedCall: a call of a shared linear, with the exchanges of its ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.nn.core.call import Call, LinearCall
from hqsweep.nn.core.parameter import AnyOperand
from hqsweep.ops.quantize.dequantize import dequantize_members
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.overlap.rank_rows import RankRows
from hqsweep.parallel.shards.gather_operands import Gathering
from hqsweep.parallel.shards.group_part import quantize_group_part
from hqsweep.parallel.shards.shard_part import Part, quantize_part
from hqsweep.parallel.shared.exchange import Exchange
from hqsweep.parallel.wire.tokens import Pending
from hqsweep.quant.group import Wanted, quantize_group
from hqsweep.quant.operand import HybridOperand, Operand, OperandParts, Skeleton, unflatten


@dataclass(frozen=True, kw_only=True)
class PartCall(Call):
    """A call of a module whose matrices ranks share (part_of)."""

    def quantize(
        self,
        tensor: str,
        x: Tensor,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        by_rows: bool = False,
        amaxes: Sequence[Tensor] = (),
    ) -> HybridOperand:
        """Return Call.quantize(). A part has the bytes that it has in the whole."""
        part = self.part_of(tensor, x)
        outputs = {"rowwise": rowwise, "columnwise": columnwise, "by_rows": by_rows}
        if part is None:
            return super().quantize(tensor, x, **outputs, amaxes=amaxes)
        return self.quantize_part(tensor, x, part, **outputs)

    @for_its_slot
    def quantize_part(
        self,
        tensor: str,
        x: Tensor,
        part: Part,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        by_rows: bool = False,
    ) -> HybridOperand:
        """Return quantize() for this rank's part of one matrix, or of every expert's matrix."""
        quantizer, outputs = self.quantizer(tensor), {"rowwise": rowwise, "columnwise": columnwise}
        key, states = self.key(tensor) if quantizer.reads_key else None, self.states_of(tensor, x)
        splits = self.weight_splits if tensor == "weight" else self.splits
        try:
            if splits is None:
                return quantize_part(quantizer, x, part, key=key, states=states, **outputs)
            wanted = Wanted(**outputs, keys=key, states=states, by_rows=by_rows)
            return quantize_group_part(quantizer, x, splits, part, wanted)
        except UserError as error:
            raise UserError(f"{self.layer}: {tensor}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class SharedCall(PartCall, LinearCall):
    """A call of a linear whose features or experts ranks share."""

    exchange: Exchange | None = None
    """The exchange of the ranks; None: each rank has all features of its experts."""
    mean_over: int = 1
    """The number of data-parallel ranks whose rows are multiplied here. Gradients of parameters are divided by it,
    since they are averaged over these ranks."""

    @property
    def made_together(self) -> bool:
        """As in LinearCall: whether other ranks make operands of their parts of the weight at the same time."""
        return self.exchange is not None

    def part_of(self, tensor: str, x: Tensor) -> Part | None:
        return None if self.exchange is None else self.exchange.parts.get(tensor)

    def tokens_of(self, tensor: str, x: Tensor) -> Part | None:
        """Return the place of x's rows among the tokens of all ranks; None if x has all tokens."""
        return None if self.exchange is None else self.exchange.tokens(tensor, len(x))

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """Return x [rows, C]; if each rank has some of the tokens, the rows of all ranks."""
        return x if self.exchange is None else self.exchange.gathered(tensor, x)

    def summed(self, tensor: str, x: Tensor) -> Tensor:
        """Return x [rows, C]; if each rank has a part of its sums, the whole sum, or this rank's tokens of it."""
        return self.begin_summed(tensor, x)()

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """Start summed() beside the work that follows (parallel.wire.tokens)."""
        return (lambda: x) if self.exchange is None else self.exchange.begin_summed(tensor, x)

    def product(
        self, gemm: str, a: AnyOperand | RankRows, b: AnyOperand, out_dtype: torch.dtype
    ) -> Tensor | Sequence[Tensor]:
        """Return LinearCall.product(), also by the rows of each rank."""
        if not isinstance(a, RankRows):
            return super().product(gemm, a, b, out_dtype)
        if self.context.reader is not None:
            self.context.reader(self, gemm, a, b)
        return a.product(b, out_dtype)

    @for_its_slot
    def of_codes(
        self,
        tensor: str,
        x: Tensor,
        row: Operand,
        *,
        rowwise: Output | None,
        columnwise: Output | None,
        by_rows: bool = False,
    ) -> HybridOperand:
        """Return quantize() for a tensor with a known rowwise operand, whose values give the columnwise operand."""
        column, quantizer = None, self.quantizer(tensor)
        if columnwise:
            values = dequantize_members(row.buffers, row.format, row.layout, row.dtype)
            of_values = replace(quantizer, columnwise_source="original")
            fields = {"keys": self.key(tensor) if quantizer.reads_key else None, "by_rows": by_rows}
            fields |= {"rowwise": None, "columnwise": columnwise}
            column = quantize_group(values, self.splits, of_values, **fields).columnwise
        return HybridOperand(rowwise=row.operand() if rowwise == "exact" else row, columnwise=column)

    def begin_saved_input(
        self, tensors: Sequence[Tensor], skeleton: Skeleton | None, *, early: bool
    ) -> Callable[[], AnyOperand]:
        """Start saved_input(). Rows of other ranks arrive beside other work, and are good until the next exchange of
        rows.

        early: the operand is unchanged since forward, so that it may be sent before the latest enqueued work
        (parallel.wire.p2p_copy.begin).
        """
        if skeleton is not None:
            return self.begin_whole_input(unflatten(tensors, skeleton), lent=True, early=early)
        outputs = {"columnwise": self.product_takes, "by_rows": self.by_rows("wgrad")}
        arriving = (lambda: tensors[0]) if self.exchange is None else self.exchange.begin_gathered("input", tensors[0])
        return lambda: self.quantize("input", arriving(), **outputs).columnwise

    def begin_whole_input(
        self, column: AnyOperand, *, lent: bool = False, early: bool = False
    ) -> Callable[[], AnyOperand]:
        """Start to gather a columnwise operand of x, if it has only this rank's tokens; else return it.

        Gathers as begin_saved_input() does. lent, early: as in parallel.shards.gather_operands.Gathering.
        """
        if isinstance(column, OperandParts):
            return column.operand
        if self.exchange is None or self.splits is not None or not isinstance(column, Operand):
            return lambda: column  # experts have all tokens, and so does what was made to be multiplied at once
        part = self.exchange.tokens("input", column.shape[1])
        if part is None:
            return lambda: column
        exact = self.product_takes == "exact"
        gathering = Gathering(column, 1, part, lent=lent and exact, early=early)
        return gathering.exact if exact else gathering.whole
