"""The three GEMMs of a linear on operands, and as one autograd function: y = x @ w.T + b, and from dy: dx = dy @ w,
dw = dy.T @ x.

With experts each has its own rows of x and dy, its own w and its own b; without, all is one matrix. A `call` is a
LinearCall: more is asked of it here than a Call has.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hqsweep.gemm.exact import add_mm_t
from hqsweep.nn.core.call import Call
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    are_filled_again,
    flatten_weights,
    is_held,
    summed_main_grad,
    unflatten_weights,
)
from hqsweep.nn.core.products import once_differentiable, returned
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.overlap.chunked_input import OperandsInTurn, in_turn, is_hooked
from hqsweep.parallel.overlap.overlapped_gemm import (
    LateOperands,
    Outgoing,
    RankRows,
    begin_summed_product,
    quantize_tokens,
)
from hqsweep.parallel.overlap.prefetch import made_in_backward
from hqsweep.parallel.wire.tokens import Pending
from hqsweep.quant.operand import HybridOperand, Skeleton, flatten
from hqsweep.torch_private import foreach_add_, foreach_div_

Gradient = Tensor | None
Maker = Callable[[], None]


class BackwardState(NamedTuple):
    """What backward reads of a linear beside the saved tensors, of which `of_weights` are its weights' and `of_input`
    its input's."""

    call: Call
    of_weights: int
    own: Sequence[Tensor]
    """Tensors of weights that ranks gather anew for backward. They are not among the saved ones, since hooks of saved
    tensors would copy memory that is free."""
    of_input: int
    weight_skeletons: Sequence[Skeleton]
    """The skeletons of weights that are held; without any the tensors are the weights themselves."""
    skeleton: Skeleton | None
    """The skeleton of x's columnwise operand; None: x itself is saved."""
    weights: Weights | None
    """The weights, where dw goes to their main_grad."""
    one_parameter: bool
    """Whether there is one weight, and all gradients are its own."""
    dw_dtype: torch.dtype
    stays: bool
    """Whether the saved tensors of x, which ranks exchange, stay where they are until backward."""

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The saved tensors of the weights, and those of x."""
        return self.own or tensors[: self.of_weights], tensors[self.of_weights : self.of_weights + self.of_input]


def input_column(call: Call, needs_dw: bool) -> Output | None:
    """The columnwise output of x that forward makes, to be saved."""
    return "codes" if needs_dw and not call.save_original else None


def check_weights(call: Call, weights: Weights, needs_dx: bool, needs_dw: bool) -> None:
    """UserError for weights that one of the GEMMs could not use."""
    if is_held(weights) or call.main_grad:
        call.check_weights(weights, needs_dx, needs_dw)


def fprop(call: Call, weights: Weights, x: AnyOperand | RankRows, needs_dx: bool) -> Tensor:
    """y, from x's rowwise operand; summed over ranks, where each has a part of its sums, or left so."""
    early = call.early.pop("rowwise", None)
    w = call.weight(weights, "rowwise", needs_dx=needs_dx) if early is None else early
    return call.output_of(begin_summed_product(call, "fprop", "output", x, w))


def quantize_input(call: Call, x: Tensor, columnwise: Output | None) -> HybridOperand | LateOperands | OperandsInTurn:
    """The operands of x: the rowwise one to be multiplied, the columnwise one, if any, to be saved behind that."""
    if call.turns:
        return in_turn(call, call.turns.pop(), x, rowwise=call.product_takes, columnwise=columnwise)
    known = {"amaxes": call.input_amaxes}
    return quantize_tokens(call, "input", x, rowwise=call.product_takes, columnwise=columnwise, **known)


def keep(
    call: Call, weights: Weights, x: Tensor | None, column: AnyOperand | None, needs_dx: bool
) -> tuple[list[Tensor], BackwardState]:
    """The tensors to save, and what else backward needs.

    column: x's columnwise operand as codes; without it x itself is saved, or nothing where there is no x, either.
    """
    of_weights, skeletons = flatten_weights(weights) if is_held(weights) and needs_dx else (weights, ())
    of_weights = of_weights if needs_dx else ()
    own, of_weights = (of_weights, ()) if are_filled_again(weights) else ((), of_weights)
    saved, skeleton = flatten(column) if column is not None else ([] if x is None else [x], None)
    state = BackwardState(
        call=call,
        of_weights=len(of_weights),
        own=own,
        of_input=len(saved),
        weight_skeletons=skeletons,
        skeleton=skeleton,
        weights=weights if call.main_grad else None,
        one_parameter=call.splits is None or weights[0].dim() == 3,
        dw_dtype=torch.float32 if call.main_grad else weights[0].dtype,
        stays=call.exchange is not None and not torch.compiler.is_compiling() and not is_hooked(),
    )
    return [*of_weights, *saved], state


def send_gradient(call: Call, weights: Weights, *, rowwise: bool, columnwise: bool, also: Sequence[Maker] = ()) -> None:
    """Have the norm that alone reads y, where there is one, send dy as soon as it knows it, and the operands for dgrad
    of the weights, and of what follows in backward, made before others are waited for. also: makes such ones."""
    if call.left is None:
        if rowwise and call.exchange is not None:
            made_in_backward(partial(call.make_early, weights, "columnwise"))
    elif rowwise or columnwise:
        alone, takes = replace(call, left=None), call.product_takes  # not itself, which would never be freed
        outputs = {"rowwise": takes if rowwise else None, "columnwise": takes if columnwise else None}
        call.left.outgoing = Outgoing(call=alone, tensor="grad_output", **outputs)
        if rowwise:
            call.left.owed = made_in_backward(partial(alone.make_early, weights, "columnwise"), *also)


def quantize_gradient(call: Call, dy: Tensor, **outputs: Any) -> HybridOperand:
    """The operands of dy, which may have been sent before; see quantize_tokens()."""
    operands = None if call.left is None else call.left.operands(dy)
    return quantize_tokens(call, "grad_output", dy, **outputs) if operands is None else operands


def begin_dgrad(state: BackwardState, tensors: Sequence[Tensor], dy: AnyOperand | RankRows) -> Pending:
    """dx, from dy's rowwise operand; where ranks sum it, the sum goes on beside the work that follows. tensors: what
    keep() gave."""
    of_weights, _ = state.parts(tensors)
    call, skeletons = state.call, state.weight_skeletons
    w_column = call.early.pop("columnwise", None)
    if w_column is None:
        w_column = unflatten_weights(of_weights, skeletons) if skeletons else call.weight(of_weights, "columnwise")
    return begin_summed_product(call, "dgrad", "grad_input", dy, w_column)


def begin_input(state: BackwardState, tensors: Sequence[Tensor]) -> Callable[[], AnyOperand]:
    """x's columnwise operand, for wgrad; what other ranks have of it arrives beside the work that follows. tensors:
    what keep() gave."""
    _, saved = state.parts(tensors)
    return state.call.begin_saved_input(saved, state.skeleton, early=state.stays)


def wgrad(
    state: BackwardState, dy: AnyOperand, x: AnyOperand, *, may_add: bool = True
) -> Tensor | Sequence[Tensor] | None:
    """dw of each expert, from the columnwise operands of dy and x; None where the GEMM has added it to main_grad, which
    it does unless may_add is False."""
    call = state.call
    if may_add and state.weights is not None and call.plans is None and call.gemm != "native":
        add_mm_t(summed_main_grad(state.weights[0]), dy, x)
        return None
    return call.product("wgrad", dy, x, state.dw_dtype)


def delivered(
    state: BackwardState, gradients: Tensor | Sequence[Tensor] | None, needs: Sequence[bool]
) -> list[Gradient]:
    """The gradients of the weights as autograd takes them; None where main_grad has got them."""
    if gradients is None:
        return [None] * len(needs)
    weights, one_parameter = state.weights, state.one_parameter
    whole = one_parameter and isinstance(gradients, Tensor)
    if weights is None and one_parameter:
        return [gradients if whole else torch.stack(list(gradients))]
    if weights is None:
        return [dw if needed else None for dw, needed in zip(gradients, needs, strict=True)]
    if whole:
        summed_main_grad(weights[0]).add_(gradients)
        return [None]
    needed = [i for i in range(len(gradients)) if needs[0 if one_parameter else i]]
    main_grads = (
        summed_main_grad(weights[0]).unbind(0) if one_parameter else [summed_main_grad(weights[i]) for i in needed]
    )
    foreach_add_(main_grads, [gradients[i] for i in needed])
    return [None] * len(needs)


def one_wgrad(state: BackwardState, dy: AnyOperand, x_column: Callable[[], AnyOperand]) -> Gradient:
    """The gradient of a linear's one weight as autograd takes it, once x has come."""
    (dw,) = delivered(state, _mean(state.call, wgrad(state, dy, x_column())), [True])
    return dw


class LinearFunction(torch.autograd.Function):
    """x [M, K], then `count` weights ([N, K] each, or one [E, N, K]), then the biases likewise, if any -> y [M, N].
    With a ticket the gradient of the one weight comes late (nn.left_sums).

    It saves x's columnwise operand as codes (with save_original x itself), and of the weights what flatten_weights
    gives: the columnwise operands that are held, or the weights, from which backward makes them again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, call: Call, count: int, ticket: Tensor | None, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        needs_dx = ctx.needs_input_grad[0] and call.grad
        needs_dw = call.grad and any(ctx.needs_input_grad[4 : 4 + count])
        check_weights(call, weights, needs_dx, needs_dw)
        column = input_column(call, needs_dw)
        operands = quantize_input(call, x, column)
        y = fprop(call, weights, operands.rowwise, needs_dx)
        ctx.probed = call.probe_forward(call.gathered("input", x), weights, y) if call.context.probe else None
        tensors, ctx.state = keep(
            call, weights, x if needs_dw else None, operands.columnwise if column else None, needs_dx
        )
        ctx.call, ctx.count = call, count
        send_gradient(call, weights, rowwise=needs_dx, columnwise=needs_dw)
        ctx.biases = [(bias.dtype, bias.dim()) for bias in biases] if biases else ()
        ctx.save_for_backward(*tensors)
        return returned(_add_biases(call, y, biases) if biases else y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, state, count, needs_dx = ctx.call, ctx.state, ctx.count, ctx.needs_input_grad[0]
        is_late, *needed = ctx.needs_input_grad[3:]
        needs_dw, needs_db = needed[:count], needed[count:]
        tensors, dx = ctx.saved_tensors, None
        dy = in_dtype(dy, call.dtype)
        if call.splits is not None and not call.codes:
            dy = dy.contiguous()
        if ctx.probed or any(needs_db):  # which read all rows
            dy = call.gathered("grad_output", dy)
        if ctx.probed:
            call.probe_parts("grad_output", dy)
        row, column = (call.product_takes if needs_dx else None), (call.product_takes if any(needs_dw) else None)
        outputs = {"rowwise": row, "columnwise": column, "by_rows": call.by_rows("wgrad")}
        # Of ranks that share the linear, x arrives beside what came before, or dgrad; dx is summed beside a part of it.
        x_column = begin_input(state, tensors) if column else None
        operands = quantize_gradient(call, dy, **outputs)
        if needs_dx:
            dx_sum = begin_dgrad(state, tensors, operands.rowwise)
            if ctx.probed:
                dx = dx_sum()
                call.probe_gemms("dgrad", call.parts(dy), [w.t() for w in ctx.probed[1]], call.parts(dx))
        dw, dticket = [None] * count, None
        if column and is_late and needs_dx and not ctx.probed:
            call.gradient.late = partial(one_wgrad, state, operands.columnwise, x_column)
            dticket = dy.new_empty(0)
        elif column:
            gradients = wgrad(state, operands.columnwise, x_column(), may_add=not ctx.probed)
            if ctx.probed:
                _probe_wgrad(call, dy, ctx.probed[0], gradients)
            gradients = _mean(call, gradients)
            dw = delivered(state, gradients, needs_dw)
            if call.left is not None:
                call.exchange.all_read(dy)
        if needs_dx:
            dx = call.rounded("grad_input", call.gradient_of(dx_sum) if dx is None else dx)
        db = _mean(call, _bias_gradients(call, dy, ctx.biases)) if any(needs_db) else [None] * len(ctx.biases)
        return dx, None, None, dticket, *dw, *db


def _mean(call: Call, sums: Tensor | Sequence[Tensor] | None) -> Tensor | Sequence[Tensor] | None:
    """Gradients of parameters, divided by the number of ranks where the rows are those of many ranks."""
    if call.mean_over > 1 and sums is not None:
        foreach_div_([sums] if isinstance(sums, Tensor) else list(sums), call.mean_over)
    return sums


def _add_biases(call: Call, y: Tensor, biases: Sequence[Tensor]) -> Tensor:
    rows, splits = biases[0] if biases[0].dim() == 2 else biases, call.splits
    if splits is not None and (splits.sizes is None or splits.equal):  # one addition for all, and nothing waits
        rows = in_dtype(rows if isinstance(rows, Tensor) else torch.stack(list(rows)), call.dtype)
        if splits.sizes is None:
            return y.add_(splits.spread(rows))
        y.view(splits.count, splits.equal, -1).add_(rows.unsqueeze(1))
        return y
    for part, bias in zip(call.parts(y), rows, strict=True):
        part.add_(in_dtype(bias, call.dtype))
    return y


def _bias_gradients(call: Call, dy: Tensor, biases: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """The sums of the unquantized dy in float32, for each expert. With splits that only a device knows, each column is
    summed row by row (torch's SegmentReduce.cu has a thread for each), and not in the tree of Tensor.sum."""
    (dtype, axes), splits = biases[0], call.splits
    if splits is not None and splits.sizes is None:
        offsets = splits.offsets(dy.device)  # unsafe: unchecked, for a check waits
        sums = torch.segment_reduce(dy.float(), "sum", offsets=offsets, axis=0, unsafe=True).to(dtype)
        return [sums] if axes == 2 else list(sums.unbind(0))
    sums = [part.sum(dim=0, dtype=torch.float32) for part in call.parts(dy)]
    return [in_dtype(torch.stack(sums), dtype)] if axes == 2 else [in_dtype(own, dtype) for own in sums]


def _probe_wgrad(call: Call, dy: Tensor, x: Tensor, gradients: Tensor | Sequence[Tensor]) -> None:
    of_experts = [gradients] if call.splits is None else gradients
    dy_parts, x_parts = ([part.t() for part in call.parts(tensor)] for tensor in (dy, x))
    call.probe_gemms("wgrad", dy_parts, x_parts, of_experts)
