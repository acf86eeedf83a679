"""Operands and products of a shared linear, by the rows of each rank, beside messages of other ranks.

If each rank has some of the tokens, it multiplies its own rows first, while the others arrive. If a product is summed
over ranks, it multiplies the rows of other ranks first; they travel while its own rows are multiplied. Rows of a
product do not depend on other rows (tests/gemm/test_exact.py checks cuBLAS), so all bits equal one whole product.

Operands of a layer's weights are made before their use, while ranks wait for each other.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.memo import cached_property
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.core.parameter import AnyOperand, Weights, is_gathered, is_held
from hqsweep.nn.linears import rows_of
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.shards.gather_operands import Gathering, sent_bytes
from hqsweep.parallel.shards.shard_part import Part, is_alone, is_part
from hqsweep.parallel.shared.call import OneOperand, RankRows, SharedCall, decoded, hides, span
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.tokens import LentRows, Pending, start_lent_rows, start_sum_rows
from hqsweep.quant.hybrid import Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand

Maker = Callable[[], None]


@dataclass(eq=False)
class Prefetched:
    """The operands of one call's weight that are made and not yet taken."""

    operands: dict[Direction, AnyOperand] = field(default_factory=dict)

    @torch.no_grad()
    def make(self, call: LinearCall, weights: Weights, direction: Direction) -> None:
        """Make call.weight() early, unless it needs more than the weights, or exists."""
        if direction in self.operands:
            return
        quantizer = call.quantizers.weight
        plain = type(quantizer) is HybridQuantizer and not quantizer.delayed and not call.context.probe
        if not plain or call.workspace is not None or is_held(weights) or is_gathered(weights):
            return
        if weights[0].untyped_storage().nbytes():  # which fully_shard may have freed, and not yet gathered again
            self.operands[direction] = call.weight(weights, direction)

    def take(self, direction: Direction) -> AnyOperand | None:
        """Return the operand of a direction, once; None if it is not made."""
        return self.operands.pop(direction) if direction in self.operands else None


@dataclass(eq=False)
class LayerWeights:
    """The weights of one call of a layer."""

    makers: Mapping[nn.Module, Callable[[], AnyOperand | None]]
    """Linear -> the function that makes its operand for forward; None for a linear without such an operand."""
    made: dict[nn.Module, AnyOperand] = field(default_factory=dict, init=False)
    """The operands that are made and not yet taken."""
    backward: list[Maker] = field(default_factory=list, init=False)
    """Functions that make an operand for backward, unless it is made; in the order of backward."""

    def owe(self, group: ProcessGroup, device: torch.device) -> None:
        """Defer the operands for forward until the current stream would wait for ranks of the group."""
        if self.makers:
            p2p_copy.owe(group, device, self.make)

    def make(self) -> None:
        """Make the operands for forward."""
        makers, self.makers = self.makers, {}
        for linear, maker in makers.items():
            operand = maker()
            if operand is not None:
                self.made[linear] = operand

    def take(self, linear: nn.Module) -> Prefetched:
        """Return the prefetched operand of the linear for forward, once."""
        operand = self.made.pop(linear, None)
        return Prefetched({} if operand is None else {"rowwise": operand})

    def made_in_backward(self, *makers: Maker) -> list[Maker]:
        """Return the makers of the layer's operands for backward, up to the linear that forward calls now.

        The linear's own makers come first.
        """
        self.backward = [*makers, *self.backward]
        return self.backward

    @contextmanager
    def lent(self, *linears: nn.Module) -> Iterator[None]:
        """A context for the call of the layer, in which the shared linears use these weights."""
        for linear in linears:
            linear.parallel.layer = self
        try:
            yield
        finally:
            for linear in linears:
                linear.parallel.layer = None


HIDING_FEATURES = 1600
"""With this many output features, a bfloat16 product takes longer than the transfer of its input to another GPU.

A feature costs 2 K operations at 600 TFLOP/s. A row has 2 K bytes at 370 GB/s.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LateOperands:
    """The operands of a tensor whose rows are arriving. This rank's own rows can be multiplied before."""

    part: Part
    own: ExactOperand
    """This rank's rows of the rowwise operand."""
    arrive: Callable[[], HybridOperand]

    @cached_property
    def whole(self) -> HybridOperand:
        """The operands of all rows."""
        return self.arrive()

    @property
    def rowwise(self) -> RankRows:
        """The rowwise operand by the rows of each rank."""
        return RankRows(part=self.part, rows=len(self.own.matrix), of_rank=self._of_rank)

    @property
    def columnwise(self) -> OneOperand | None:
        """The columnwise operand of all rows."""
        return self.whole.columnwise

    def _of_rank(self, rank: int) -> ExactOperand:
        rows = len(self.own.matrix)
        return self.own if rank == self.part.group.rank() else rows_of(self.whole.rowwise, *span(rank, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """Work and messages beside the exchange of an input."""

    sending: p2p_copy.Sending | None = None
    """The exchange that sent the rows while they were computed, if there was one."""
    weights: LayerWeights | None = None
    """The weights of the layer. Their operands are made before this rank waits for others."""

    def owe_weights(self, part: Part, x: Tensor) -> None:
        """Defer the operands of the weights until the stream would wait for the ranks that share x."""
        if self.weights is not None:
            self.weights.owe(part.group, x.device)


NOTHING = Beside()


def quantize_tokens(
    call: SharedCall,
    tensor: str,
    x: Tensor,
    *,
    rowwise: Output | None = None,
    columnwise: Output | None = None,
    by_rows: bool = False,
    beside: Beside = NOTHING,
) -> HybridOperand | LateOperands:
    """Return call.quantize() for all tokens of a tensor of which each rank may have some.

    The rowwise operand is RankRows if that is worth it. Tokens travel as codes if these have fewer bytes and no block
    is cut; else x is gathered and quantized once. If an input travels as codes, its columnwise operand has only this
    rank's tokens until begin_whole_input().
    """
    outputs, part = {"rowwise": rowwise, "columnwise": columnwise}, call.tokens_of(tensor, x)
    if part is None:
        return call.quantize(tensor, x, **outputs, by_rows=by_rows)
    by_ranks = rowwise is not None and multiplies_by_ranks(call, part, x)
    if _sends_codes(call.quantizer(tensor), tensor, x, part, rowwise, columnwise):
        row, column, exact = _send_codes(call, tensor, x, part, outputs, decodes=by_ranks, beside=beside)
        if by_ranks:
            rank, of_codes = part.group.rank(), row.of_rank
            of_rank = of_codes if exact is None else lambda each: exact if each == rank else of_codes(each)
            row = RankRows(part=part, rows=len(x), of_rank=of_rank)
        return HybridOperand(rowwise=_whole(row), columnwise=_whole(column))
    if not by_ranks or not is_alone(call.quantizer(tensor), x.shape, part, rowwise, None):
        return call.quantize(tensor, call.gathered(tensor, x), **outputs, by_rows=by_rows)
    arriving = call.exchange.begin_lent(tensor, x)
    own = call.quantize_part(tensor, x, part, rowwise=rowwise).rowwise
    beside.owe_weights(part, x)
    outputs["by_rows"] = by_rows
    return LateOperands(part=part, own=own, arrive=lambda: call.quantize(tensor, arriving(), **outputs))


@dataclass(kw_only=True, eq=False)
class Outgoing:
    """quantize_tokens() of a tensor that is sent as soon as its rows are computed."""

    call: SharedCall
    tensor: str
    rowwise: Output | None
    columnwise: Output | None
    lent: bool = True
    """Whether operands may use the receive memory, which is good until the group's next exchange of rows."""
    _placed: LentRows | None = field(default=None, init=False)

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return where to write the rows, with the shape of `like` and a dtype; None: anywhere."""
        rows = torch.empty((like.shape[:-1].numel(), like.shape[-1]), dtype=dtype, device="meta")
        part = self.call.tokens_of(self.tensor, rows)
        if part is None or part.runs > 1 or self._sends_codes(rows, part):
            return None
        self._placed = start_lent_rows(tuple(rows.shape), dtype, part.group, like.device)
        return None if self._placed is None else self._placed.rows.view(like.shape)

    def begin(self, x: Tensor) -> Callable[[], HybridOperand]:
        """Start to send x. The returned function gives the operands of all tokens, each as one."""
        call, tensor, placed = self.call, self.tensor, self._placed
        outputs, part = {"rowwise": self.rowwise, "columnwise": self.columnwise}, call.tokens_of(tensor, x)
        self._placed = None
        if placed is None and part is not None and self._sends_codes(x, part):
            row, column, _ = _send_codes(call, tensor, x, part, outputs)
            return lambda: HybridOperand(rowwise=_whole(row), columnwise=_whole(column))
        if placed is not None:
            arriving = placed.begun()
        else:
            exchange = call.exchange
            begin = None if part is None else exchange.begin_lent if self.lent else exchange.begin_gathered
            arriving = (lambda: x) if begin is None else begin(tensor, x)
        return lambda: call.quantize(tensor, arriving(), **outputs)

    def _sends_codes(self, x: Tensor, part: Part) -> bool:
        return _sends_codes(self.call.quantizer(self.tensor), self.tensor, x, part, self.rowwise, self.columnwise)


def start_values(
    quantizer: HybridQuantizer, part: Part | None, features: int, x: Tensor, dtype: torch.dtype
) -> p2p_copy.Sending | None:
    """Return an exchange for the rows of an input, with the shape and device of x, in a dtype.

    The kernel that computes the rows writes them to the memory of all ranks; quantize_tokens() sends the same values as
    codes. None if no such exchange exists, or if the product of this rank's rows hides copies of them. features: output
    features of that product.
    """
    rows = torch.empty((x.shape[:-1].numel(), x.shape[-1]), dtype=dtype, device="meta")
    plain = quantizer.rowwise.high_precision and dtype is torch.bfloat16
    if part is None or part.runs > 1 or not plain or features >= HIDING_FEATURES:
        return None
    codes = all(_sends_codes(quantizer, "input", rows, part, "codes", column) for column in (None, "codes"))
    return p2p_copy.start(rows.nbytes, part.group, x.device, reading=True) if codes else None


def _send_codes(
    call: SharedCall,
    tensor: str,
    x: Tensor,
    part: Part,
    outputs: Mapping[str, Output | None],
    *,
    decodes: bool = False,
    beside: Beside = NOTHING,
) -> tuple[Gathering | None, Gathering | Operand | None, ExactOperand | None]:
    """Send the codes of this rank's tokens to the others. An input's columnwise codes are not sent.

    decodes: the exact operand of the rowwise codes is wanted, too, if it comes with them.
    """
    codes, quantizer = {name: output and "codes" for name, output in outputs.items()}, call.quantizer(tensor)
    if decodes and is_alone(quantizer, x.shape, part, **codes):
        own = quantizer.quantize_sent(x, codes["columnwise"])
    else:
        own = call.quantize_part(tensor, x, part, **codes)
    beside.owe_weights(part, x)
    row, column = own.rowwise and Gathering(own.rowwise, 0, part, sending=beside.sending), own.columnwise
    column = column if column is None or tensor == "input" else Gathering(column, 1, part)
    return row, column, own.rowwise_exact


def _whole(operand: Gathering | RankRows | Operand | None) -> RankRows | Operand | None:
    return operand.whole() if isinstance(operand, Gathering) else operand


def multiplies_by_ranks(call: SharedCall, part: Part, x: Tensor) -> bool:
    """Return whether the product of x is computed by the rows of each rank.

    The rows must be contiguous and many. A trace waits for every collective at once, and native GEMMs take whole
    operands.
    """
    adjacent = part.axis == 0 and part.runs == 1 and call.splits is None and call.gemm != "native"
    return adjacent and hides(x) and not torch.compiler.is_compiling()


def begin_summed_product(call: SharedCall, gemm: str, tensor: str, a: OneOperand | RankRows, b: OneOperand) -> Pending:
    """Start the product of a call, summed over ranks if each has a part of its sums (parallel.wire.tokens).

    The result has all rows, or this rank's tokens.
    """
    splits = call.exchange is not None and call.exchange.splits_tokens(tensor)
    a = _by_ranks(call, tensor, a) if splits else a
    if not splits or not isinstance(a, RankRows):
        return call.begin_summed(tensor, call.product(gemm, a, b, call.dtype))
    (own, place), *others = a.order
    b = decoded(b)
    y = b.matrix.new_empty((a.rows * (1 + len(others)), len(b.matrix)), dtype=call.dtype)
    total, pieces = start_sum_rows(y, a.part.group), a.pieces
    for other, (start, _) in others:
        of_other = decoded(a.of_rank(other))
        for piece in range(pieces):
            first, last = span(piece, a.rows // pieces)
            mm_t(rows_of(of_other, first, last), b, out_dtype=y.dtype, out=y[start + first : start + last])
            total.ready(start + first, start + last)
    pending = total.begun()
    mm_t(decoded(a.of_rank(own)), b, out_dtype=y.dtype, out=y[slice(*place)])
    return pending


def _by_ranks(call: SharedCall, tensor: str, a: OneOperand | RankRows) -> OneOperand | RankRows:
    """Return `a` by the rows of each rank, if ranks keep their tokens of its product and it is worth it."""
    if not isinstance(a, ExactOperand) or a.matrix.dim() != 2:
        return a
    part = call.exchange.parts[tensor]
    rows = len(a.matrix) // part.group.size()
    if not multiplies_by_ranks(call, part, a.matrix[:rows]):
        return a
    return RankRows(part=part, rows=rows, of_rank=lambda rank: rows_of(a, *span(rank, rows)), by_halves=True)


def _sends_codes(
    quantizer: HybridQuantizer,
    tensor: str,
    x: Tensor,
    part: Part,
    rowwise: Output | None,
    columnwise: Output | None,
) -> bool:
    """Return whether codes of this rank's tokens are sent in place of x.

    Each operand of an input is sent by itself, in forward and in backward.
    """
    if not is_part(quantizer, x.shape, part, rowwise, columnwise):
        return False
    row = sent_bytes(quantizer.rowwise, tuple(x.shape), 0) if rowwise else 0
    column = sent_bytes(quantizer.columnwise, tuple(x.shape[::-1]), 1) if columnwise else 0
    return max(row, column) <= x.nbytes if tensor == "input" else row + column < x.nbytes
