"""SharedCall: a call of a shared linear, with the exchanges of its ranks.

LinearShare says how the ranks of a group share a linear. Exchange has the messages of one call. RankRows is the rowwise
operand of all tokens by the rows of each rank, in the order in which they are multiplied.

column: a rank has rows of W [N, K], and computes columns of y from the whole x. Gradients of x are summed over ranks.
row: a rank has columns of W and of x. The products are summed over ranks to y, and dy is whole.

With a sequence axis the tokens of the whole x or y are split over ranks. It is gathered before the product, and sums
stay split (Korthikanti et al., arXiv 2205.05198).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.nn.core.call import Call, LinearCall
from hqsweep.nn.core.parameter import AnyOperand
from hqsweep.ops.quantize.dequantize import dequantize_members
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.shards.gather_operands import Gathering
from hqsweep.parallel.shards.shard_part import CUTS, Mode, Part, quantize_part
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.tokens import (
    Pending,
    begin_gather_rows,
    begin_lent_rows,
    begin_sum_rows,
    sum_whole,
)
from hqsweep.quant.group import Wanted, quantize_group, quantize_group_part
from hqsweep.quant.operand import HybridOperand, Operand, OperandParts, Skeleton, unflatten

LEAST_ROWS = 2048
"""The least rows of a rank for a product by ranks. For fewer, a launch costs more than it hides."""
OneOperand = Operand | ExactOperand
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """The rowwise operand of all tokens by the rows of each rank."""

    part: Part
    rows: int
    """The rows of each rank."""
    of_rank: Callable[[int], OneOperand]
    """Returns a rank's rows; waits for rows of another rank to arrive."""
    by_halves: bool = False
    """Whether a summed product sends another rank the first half of its rows while the second half is computed.

    False if this rank's own rows take longer to compute than rows take to travel.
    """

    @property
    def pieces(self) -> int:
        """The number of equal pieces of another rank's rows that are sent one by one."""
        return 2 if self.by_halves and self.rows % 2 == 0 and self.rows >= 2 * LEAST_ROWS else 1

    @property
    def order(self) -> list[tuple[int, Span]]:
        """Each rank with the span of its rows in the whole, in the order of multiplication: this rank first."""
        rank, world = self.part.group.rank(), self.part.group.size()
        ranks = [rank, *(other for other in range(world) if other != rank)]
        return [(each, span(each, self.rows)) for each in ranks]

    def product(self, b: OneOperand, out_dtype: torch.dtype) -> Tensor:
        """Return mm_t of the whole and b."""
        b, y = decoded(b), None
        for rank, (start, stop) in self.order:
            a = decoded(self.of_rank(rank))
            if y is None:
                y = a.matrix.new_empty((self.rows * self.part.group.size(), len(b.matrix)), dtype=out_dtype)
            mm_t(a, b, out_dtype=out_dtype, out=y[start:stop])
        return y


def span(rank: int, rows: int) -> Span:
    """Return the rows of a rank in the whole."""
    return rank * rows, (rank + 1) * rows


def decoded(operand: OneOperand) -> ExactOperand:
    """Return the operand as a product takes it."""
    return operand.operand() if isinstance(operand, Operand) else operand


def hides(x: Tensor) -> bool:
    """Return whether a product of the rows x hides messages that travel meanwhile.

    On a CPU nothing travels beside a product, and a library may add in another order for other numbers of rows.
    """
    return x.is_cuda and len(x) >= LEAST_ROWS


TOKENS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"column": ("input", "grad_input"), "row": ("grad_output", "output")}
)
"""Mode -> the tensor to gather, and the tensor to sum, if tokens are split over ranks."""


@dataclass(kw_only=True, eq=False)
class LinearShare:
    """How the ranks of a group share a linear. It cannot be copied, because a group cannot."""

    group: ProcessGroup
    mode: Mode
    sequence: int | None = None
    """The axis of x, or of y, along which tokens are split over ranks; None: every rank has all tokens."""
    pieces: int = 1
    """The number of matrices in the weight, one below the other, that are cut separately, such as q, k and v."""
    sums: bool = True
    """Whether ranks add up their parts of sums; else the caller adds."""

    def part_of(self, tensor: str) -> Part | None:
        """Return the place of a rank's part of a tensor that is cut along its features; None: the rank has all
        features."""
        axis = CUTS[self.mode].get(tensor)
        return None if axis is None else Part(group=self.group, axis=axis, runs=self.pieces)

    def exchange(self, shape: Sequence[int]) -> "Exchange":
        """Return the exchange of a call with an input [*shape, K]."""
        lead, ranks = 1 if self.sequence is None else math.prod(shape[: self.sequence]), self.group.size()
        if self.mode == "row" and self.sequence is not None and shape[self.sequence] % ranks:
            raise UserError(f"{shape[self.sequence]} tokens, along axis {self.sequence}, do not divide by tp={ranks}")
        rows = math.prod(shape)
        return Exchange(parallel=self, lead=lead, rows=rows if self.mode == "column" else rows // ranks)

    def __deepcopy__(self, memo: Any) -> "LinearShare":
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """The messages of the ranks in one call."""

    parallel: LinearShare
    lead: int
    """The number of sequences with split tokens, one after the other."""
    rows: int
    """The number of this rank's tokens, if tokens are split."""
    parts: Mapping[str, Part] = field(init=False)
    """Tensor -> the places of the ranks' parts. A tensor without an entry is whole."""

    def __post_init__(self) -> None:
        own = self.parallel
        cuts = {tensor: own.part_of(tensor) for tensor in CUTS[own.mode]}
        if own.sequence is not None:
            cuts[TOKENS[own.mode][1]] = Part(group=own.group, axis=0, runs=self.lead)
        object.__setattr__(self, "parts", cuts)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """Return the leading axes of y for these leading axes of x."""
        own, shape = self.parallel, list(shape)
        if own.sequence is not None:
            ranks, length = own.group.size(), shape[own.sequence]
            shape[own.sequence] = length * ranks if own.mode == "column" else length // ranks
        return shape

    def tokens(self, tensor: str, rows: int) -> Part | None:
        """Return the place of this rank's rows of the tensor, if they are some of its tokens; None for all tokens."""
        own = self.parallel
        if own.sequence is None or tensor != TOKENS[own.mode][0] or own.group.size() == 1 or rows != self.rows:
            return None
        return Part(group=own.group, axis=0, runs=self.lead)

    def splits_tokens(self, tensor: str) -> bool:
        """Return whether ranks sum the tensor, and each rank keeps its own tokens of the sum."""
        return self.parallel.sequence is not None and tensor == TOKENS[self.parallel.mode][1]

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """Return x [rows, C] of all ranks, if the tensor's tokens are split; else x itself."""
        return self.begin_gathered(tensor, x)()

    def begin_gathered(self, tensor: str, x: Tensor) -> Pending:
        """Start gathered() (parallel.wire.tokens)."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_gather_rows(x, part.group, part.runs)

    def begin_lent(self, tensor: str, x: Tensor) -> Pending:
        """Start gathered(). The result is good until the group's next exchange of rows."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_lent_rows(x, part.group, part.runs)

    def all_read(self, x: Tensor) -> None:
        """Note that all messages of other ranks on x's device are read (parallel.wire.p2p_copy.all_read)."""
        if x.is_cuda:
            p2p_copy.all_read(self.parallel.group, x.device)

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """Start the sum of x over ranks, if each rank has a part of its products; else return x (parallel.wire.tokens).

        The result is the whole sum, or this rank's tokens of it. Only the latter runs beside other work.
        """
        own = self.parallel
        if self.splits_tokens(tensor):
            return begin_sum_rows(x, own.group, self.lead)
        whole = sum_whole(x, own.group) if own.sums and tensor == TOKENS[own.mode][1] else x
        return lambda: whole


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
