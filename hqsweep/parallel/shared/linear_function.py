"""SharedLinearFunction: LinearFunction of a shared linear, in an order that hides the exchanges of its ranks.

Handover passes tensors between the steps of one call, and to the norms around the linear.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hqsweep.nn.core.call import NOTHING, KnownInput
from hqsweep.nn.core.guards import once_differentiable, returned
from hqsweep.nn.core.parameter import AnyOperand, Weights
from hqsweep.nn.core.wire import Codes
from hqsweep.nn.linears import (
    BackwardState,
    Gradient,
    add_biases,
    bias_gradients,
    check_weights,
    delivered,
    input_column,
    keep,
    probe_wgrad,
    weight_column,
    wgrad,
)
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.shared.call import RankRows, SharedCall
from hqsweep.parallel.shared.overlap import LeftGradient, LeftOutput, OperandsInTurn, Turns, in_turn, is_hooked
from hqsweep.parallel.shared.overlapped_gemm import (
    Beside,
    LateOperands,
    LayerWeights,
    Maker,
    Outgoing,
    Prefetched,
    begin_summed_product,
    quantize_tokens,
)
from hqsweep.parallel.wire.tokens import Pending
from hqsweep.quant.operand import HybridOperand
from hqsweep.torch_private import foreach_div_


@dataclass(kw_only=True, eq=False)
class Handover:
    """The tensors that the steps of one call pass on.

    A reader removes the field that it reads: this object lives until backward, and the tensors must not.
    """

    known: KnownInput = NOTHING
    """Facts of x that are known before it is quantized."""
    turns: Turns | None = None
    """The writer of x, if x is written rank by rank."""
    beside: Beside | None = None
    """Work and messages beside the exchange of x."""
    early: Prefetched = field(default_factory=Prefetched)
    """The prefetched operands of the weight."""
    layer: LayerWeights | None = None
    """The weights of the linear's layer, if they are prefetched."""
    codes: Codes | None = None
    """The operands of x and of the gradient of y, if they arrived as codes."""
    left: LeftOutput | None = None
    """Where y is deferred to its reader, if y is a sum of rows over ranks; None: y is summed."""
    gradient: LeftGradient | None = None
    """Where dx is deferred to the previous norm, if dx is such a sum."""

    def quantize_input(
        self, call: SharedCall, x: Tensor, columnwise: Output | None
    ) -> HybridOperand | LateOperands | OperandsInTurn:
        """Return the operands of x: the rowwise one for the product, and the columnwise one, if wanted, to save
        afterwards."""
        turns, known, beside = self.turns, self.known, self.beside
        outputs = {"rowwise": call.product_takes, "columnwise": columnwise}
        if turns is not None:
            self.turns = None
            return in_turn(call, turns, x, **outputs)
        if self.codes:
            return call.of_codes("input", x, self.codes.pop("input"), **outputs)
        if known.normed is not None or known.amaxes:
            self.known = NOTHING
            return call.quantize_input(x, known, **outputs)
        if beside is None:
            return quantize_tokens(call, "input", x, **outputs)
        self.beside = None
        return quantize_tokens(call, "input", x, **outputs, beside=beside)

    def fprop(self, call: SharedCall, weights: Weights, x: AnyOperand | RankRows, needs_dx: bool) -> Tensor:
        """Return y from x's rowwise operand. If ranks have parts of its sums, y is summed or deferred."""
        early = self.early.take("rowwise")
        w = call.weight(weights, "rowwise", needs_dx=needs_dx) if early is None else early
        pending = begin_summed_product(call, "fprop", "output", x, w)
        return pending() if self.left is None else self.left.leave(pending)

    def send_gradient(
        self, call: SharedCall, weights: Weights, *, rowwise: bool, columnwise: bool, also: Sequence[Maker] = ()
    ) -> None:
        """Let the norm that alone reads y send dy as soon as it has it.

        Operands of the weights for dgrad, and for later steps of backward, are made before the wait for other ranks.
        also: functions that make such operands.
        """
        layer = self.layer
        if self.left is None and layer is None:
            return
        self.layer = None
        makers = [partial(self.early.make, call, weights, "columnwise"), *also]
        if self.left is None:
            if rowwise:
                layer.made_in_backward(makers[0])
        elif rowwise or columnwise:
            takes = call.product_takes
            outputs = {"rowwise": takes if rowwise else None, "columnwise": takes if columnwise else None}
            self.left.outgoing = Outgoing(call=call, tensor="grad_output", **outputs)
            if rowwise:
                self.left.owed = makers if layer is None else layer.made_in_backward(*makers)

    def quantize_gradient(
        self,
        call: SharedCall,
        dy: Tensor,
        *,
        rowwise: Output | None,
        columnwise: Output | None,
        by_rows: bool = False,
    ) -> HybridOperand | LateOperands:
        """Return the operands of dy, which may already be sent."""
        outputs = {"rowwise": rowwise, "columnwise": columnwise, "by_rows": by_rows}
        operands = None if self.left is None else self.left.operands(dy)
        if operands is not None:
            return operands
        if self.codes:
            return call.of_codes("grad_output", dy, self.codes.pop("grad_output"), **outputs)
        return quantize_tokens(call, "grad_output", dy, **outputs)

    def begin_dgrad(self, state: BackwardState, tensors: Sequence[Tensor], dy: AnyOperand | RankRows) -> Pending:
        """Start dx, from dy's rowwise operand. If ranks sum it, the sum runs beside the work that follows.

        tensors: the saved tensors of keep().
        """
        w_column = self.early.take("columnwise")
        if w_column is None:
            w_column = weight_column(state, tensors)
        return begin_summed_product(state.call, "dgrad", "grad_input", dy, w_column)

    def gradient_of(self, call: SharedCall, pending: Pending) -> Tensor:
        """Return dx, whose sum over ranks has started; this rank's summand if the sum is deferred."""
        if self.gradient is None or call.quantizers.grad_input is not None:
            return pending()
        return self.gradient.leave(pending)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormedPart(KnownInput):
    """The KnownInput of a norm's output for this rank's tokens, for the linear that reads it."""

    early: Prefetched
    gradient: LeftGradient | None
    """Where the linear defers the gradient, if the norm takes it."""


def handover_of(known: KnownInput, layer: LayerWeights | None) -> Handover:
    """Return the Handover of a call, from the KnownInput of its input."""
    if not isinstance(known, NormedPart):
        return Handover(known=known, beside=None if layer is None else Beside(weights=layer), layer=layer)
    gradient, sent = known.gradient, None
    if gradient is not None:
        sent, gradient.sent = gradient.sent, None
    beside = Beside(sending=sent, weights=layer)
    return Handover(early=known.early, gradient=gradient, beside=beside, layer=layer)


def begin_input(state: BackwardState, tensors: Sequence[Tensor], *, early: bool) -> Callable[[], AnyOperand]:
    """Start x's columnwise operand, for wgrad. Rows of other ranks arrive beside the work that follows.

    tensors: the saved tensors of keep(). early: as in SharedCall.begin_saved_input().
    """
    _, saved = state.parts(tensors)
    return state.call.begin_saved_input(saved, state.skeleton, early=early)


def stays(call: SharedCall) -> bool:
    """Return whether the saved tensors of x keep their memory until backward, so that ranks may send them early."""
    return call.exchange is not None and not torch.compiler.is_compiling() and not is_hooked()


def one_wgrad(state: BackwardState, dy: AnyOperand, x_column: Callable[[], AnyOperand]) -> Gradient:
    """Return the gradient of a linear's single weight as autograd takes it. Waits for x."""
    (dw,) = delivered(state, mean(state.call, wgrad(state, dy, x_column())), [True])
    return dw


def mean(call: SharedCall, sums: Tensor | Sequence[Tensor] | None) -> Tensor | Sequence[Tensor] | None:
    """Return gradients of parameters, divided by the number of ranks whose rows are multiplied here."""
    if call.mean_over > 1 and sums is not None:
        foreach_div_([sums] if isinstance(sums, Tensor) else list(sums), call.mean_over)
    return sums


class SharedLinearFunction(torch.autograd.Function):
    """LinearFunction of a shared linear. With a ticket, the gradient of the single weight comes late.

    See parallel.shared.overlap.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, call: SharedCall, handover: Handover, count: int, ticket: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        needs_dx = ctx.needs_input_grad[0] and call.grad
        needs_dw = call.grad and any(ctx.needs_input_grad[5 : 5 + count])
        check_weights(call, weights, needs_dx, needs_dw)
        column = input_column(call, needs_dw)
        operands = handover.quantize_input(call, x, column)
        y = handover.fprop(call, weights, operands.rowwise, needs_dx)
        ctx.probed = call.probe_forward(call.gathered("input", x), weights, y) if call.context.probe else None
        x_column = operands.columnwise if column else None
        tensors, ctx.state = keep(call, weights, x if needs_dw else None, x_column, needs_dx)
        ctx.call, ctx.handover, ctx.count, ctx.stays = call, handover, count, stays(call)
        handover.send_gradient(call, weights, rowwise=needs_dx, columnwise=needs_dw)
        ctx.biases = [(bias.dtype, bias.dim()) for bias in biases] if biases else ()
        ctx.save_for_backward(*tensors)
        return returned(add_biases(call, y, biases) if biases else y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, handover, state, tensors, probed = ctx.call, ctx.handover, ctx.state, ctx.saved_tensors, ctx.probed
        needs_dx, _, _, _, is_late, *needed = ctx.needs_input_grad
        needs_dw, needs_db = needed[: ctx.count], needed[ctx.count :]
        dx, dw, dticket, takes = None, [None] * ctx.count, None, call.product_takes
        dy = in_dtype(dy, call.dtype)
        if call.splits is not None and not handover.codes:
            dy = dy.contiguous()
        if probed or any(needs_db):  # which read all rows
            dy = call.gathered("grad_output", dy)
        if probed:
            call.probe_parts("grad_output", dy)
        row, column = (takes if needs_dx else None), (takes if any(needs_dw) else None)
        outputs = {"rowwise": row, "columnwise": column, "by_rows": call.by_rows("wgrad")}
        # x arrives beside what came before, or dgrad; dx is summed beside a part of it.
        x_column = begin_input(state, tensors, early=ctx.stays) if column else None
        operands = handover.quantize_gradient(call, dy, **outputs)
        if needs_dx:
            dx_sum = handover.begin_dgrad(state, tensors, operands.rowwise)
            if probed:
                dx = dx_sum()
                call.probe_gemms("dgrad", call.parts(dy), [w.t() for w in probed[1]], call.parts(dx))
        if column and is_late and needs_dx and not probed:
            handover.gradient.late = partial(one_wgrad, state, operands.columnwise, x_column)
            dticket = dy.new_empty(0)
        elif column:
            gradients = wgrad(state, operands.columnwise, x_column(), may_add=not probed)
            if probed:
                probe_wgrad(call, dy, probed[0], gradients)
            dw = delivered(state, mean(call, gradients), needs_dw)
            if handover.left is not None:
                call.exchange.all_read(dy)
        if needs_dx:
            dx = call.rounded("grad_input", handover.gradient_of(call, dx_sum) if dx is None else dx)
        db = mean(call, bias_gradients(call, dy, ctx.biases)) if any(needs_db) else [None] * len(ctx.biases)
        return dx, None, None, None, dticket, *dw, *db
