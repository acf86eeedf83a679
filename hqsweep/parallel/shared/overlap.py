"""Exchanges of ranks that share a linear, beside products: its input in chunks, and sums that wait for the next norm.

Chunked input. The input of a row-parallel linear is written and quantized by the rows of each rank. Rows of the other
ranks come first, so that their products travel while this rank's rows are computed. All bits equal the bits of the
whole input, if scales and random bits belong to blocks that no cut divides.

Deferred sums. A norm adds the ranks' summands as it reads or writes its tensors. In forward a linear defers the sum of
its output to the next norm. In backward a linear defers the sum of its input's gradient to the previous norm. The
messages that follow then travel beside products:

forward   linear -> LeftOutput -> norm -> linear
backward  linear <- gradient of that output, which the norm sends at once <- norm <- LeftGradient <- linear; the
          weight's gradient of the last linear is computed after the norm's backward, while that gradient travels

Autograd takes this rank's summand for the tensor. This is safe, because the norm is the tensor's only reader and runs
next, so that autograd adds nothing to the gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hqsweep.nn.core.guards import once_differentiable, top_hooks
from hqsweep.ops.elementwise import INPUTS, activation_into
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.shards.shard_part import Part, is_alone
from hqsweep.parallel.shared.call import Exchange, OneOperand, RankRows, SharedCall, hides, span
from hqsweep.parallel.wire.p2p_copy import Sending
from hqsweep.parallel.wire.tokens import Pending, Summands, left_by
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


Arriving = Callable[[], HybridOperand]
WeightGradient = Callable[[], Tensor | None]


class Sender(Protocol):
    """A gradient that is sent as soon as its rows are computed: overlapped_gemm.Outgoing."""

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return where to write the rows; None: anywhere."""

    def begin(self, x: Tensor) -> Arriving:
        """Start to send x. The returned function gives the operands of all tokens."""


@dataclass(eq=False)
class LeftOutput:
    """The deferred output of one call of a linear, for the norm that alone reads it."""

    summands: Summands | None = None
    outgoing: Sender | None = None
    """The gradient of the output, whose operands backward reads."""
    owed: list[Callable[[], None]] = field(default_factory=list)
    """Work of backward that needs no gradient: it makes operands of weights."""
    _sent: tuple[Tensor, Arriving] | None = field(default=None, init=False)

    def leave(self, pending: Pending) -> Tensor:
        """Return the output for autograd: this rank's summand, or the whole sum."""
        self.summands = left_by(pending)
        return pending() if self.summands is None else self.summands.own

    def take(self, y: Tensor) -> Tensor | Summands:
        """Return the output y for the norm, once. Summands must not live until backward, as the call does."""
        summands, self.summands = self.summands, None
        return y if summands is None else summands.of(y)._replace(writer=self)

    def prepare(self) -> None:
        """Do the owed work, before the wait for other ranks."""
        for work in self.owed:
            work()

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return where to write the gradient (nn.core.wire.GradientReader)."""
        return None if self.outgoing is None else self.outgoing.place(like, dtype)

    def tell(self, dy: Tensor) -> None:
        """Send the gradient."""
        if self.outgoing is not None:
            dy = dy.reshape(-1, dy.shape[-1])
            self._sent = dy, self.outgoing.begin(dy)

    def operands(self, dy: Tensor) -> HybridOperand | None:
        """Return the operands of the gradient dy, once; None if it was not sent."""
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        operands = sent[1]()  # also of another tensor: all ranks wait for what they began
        return operands if sent[0].data_ptr() == dy.data_ptr() else None


@dataclass(eq=False)
class LeftGradient:
    """The deferred gradient of one call of a norm, from the linear that alone reads the norm's output."""

    name: str
    """The linear's name, for messages."""
    start: Callable[[Tensor, torch.dtype], Sending | None]
    """Starts to exchange the norm's output while the norm computes it (overlapped_gemm.start_values). Takes a tensor of
    its shape."""
    sent: Sending | None = None
    """The started exchange of the norm's output, for the linear."""
    is_taken: bool = False
    """Whether the norm's backward takes the deferred sum."""
    left: tuple[Pending, int] | None = None
    """The other ranks' summands of the gradient, and the number of this rank; None: the gradient is whole."""
    late: WeightGradient | None = None
    """Computes the gradient of the linear's weight, which is still missing."""
    _drawn: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def leave(self, pending: Pending) -> Tensor:
        """Return the gradient for autograd: this rank's summand, or the whole sum."""
        summands = left_by(pending) if self.is_taken else None
        if summands is None:
            return pending()
        self.left = summands.arriving, summands.rank
        return summands.own

    def take(self, dh: Tensor | None) -> tuple[Tensor, int] | tuple[()]:
        """Return the deferred summands and this rank's number, once, in the shape of autograd's gradient; () if it is
        whole."""
        left, self.left = self.left, None
        return () if left is None or dh is None else (left[0]().view(-1, *dh.shape), left[1])

    @contextmanager
    def sending(self, x: Tensor, dtype: torch.dtype) -> Iterator[Sequence[Tensor]]:
        """Yield memory of other ranks, with the shape of x and a dtype, for the norm's output; or nothing."""
        sending = self.start(x, dtype)
        if sending is None:
            yield ()
            return
        yield [sending.place(other).view(dtype).view(x.shape) for other in sending.others]
        sending.written()
        self.sent = sending

    def before_norm(self, weight: Tensor) -> None:
        """Note that the norm runs next, and draw a ticket, which orders backward.

        Among ready nodes of backward, autograd takes the latest of forward first. So the ticket asks for `late` after
        the norm's backward, and before all earlier nodes.
        """
        self._drawn = weight, _LateGradient.apply(weight, self)

    def ticket(self) -> tuple[Tensor, Tensor]:
        """Return the weight and the ticket for the linear's autograd function, once.

        The ticket is an empty tensor with an empty gradient. It requires no gradient if the weight requires none.
        """
        drawn, self._drawn = self._drawn, None
        return drawn


class _LateGradient(torch.autograd.Function):
    """Returns an empty tensor. Its backward computes the gradient of the weight."""

    @staticmethod
    def forward(ctx, weight: Tensor, gradient: LeftGradient) -> Tensor:
        ctx.call = gradient
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, None]:
        late, ctx.call.late = ctx.call.late, None
        return None if late is None else late(), None
