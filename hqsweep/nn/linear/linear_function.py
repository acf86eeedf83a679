"""LinearFunction: y = x @ w.T + b as one autograd function, and from dy: dx = dy @ w, dw = dy.T @ x."""

import torch
from torch import Tensor

from hqsweep.nn.core.products import once_differentiable, returned
from hqsweep.nn.linear.gemms import (
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
from hqsweep.nn.linear.linear_call import KnownInput, LinearCall
from hqsweep.ops.quantize.kernels import in_dtype


class LinearFunction(torch.autograd.Function):
    """x [M, K], `count` weights ([N, K] each, or one [E, N, K]), then as many biases, if any -> y [M, N].

    It saves x's columnwise operand as codes, or x itself with save_original. Of the weights it saves the tensors of
    flatten_weights: held columnwise operands, or the weights, from which backward makes the operands again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, call: LinearCall, known: KnownInput, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        needs_dx = ctx.needs_input_grad[0] and call.grad
        needs_dw = call.grad and any(ctx.needs_input_grad[4 : 4 + count])
        check_weights(call, weights, needs_dx, needs_dw)
        column = input_column(call, needs_dw)
        operands = call.quantize_input(x, known, rowwise=call.product_takes, columnwise=column)
        w = call.weight(weights, "rowwise", needs_dx=needs_dx)
        y = call.product("fprop", operands.rowwise, w, call.dtype)
        ctx.probed = call.probe_forward(x, weights, y) if call.context.probe else None
        x_column = operands.columnwise if column else None
        tensors, ctx.state = keep(call, weights, x if needs_dw else None, x_column, needs_dx)
        ctx.call, ctx.count = call, count
        ctx.biases = [(bias.dtype, bias.dim()) for bias in biases] if biases else ()
        ctx.save_for_backward(*tensors)
        return returned(add_biases(call, y, biases) if biases else y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, state, tensors, probed = ctx.call, ctx.state, ctx.saved_tensors, ctx.probed
        needs_dx, _, _, _, *needed = ctx.needs_input_grad
        needs_dw, needs_db = needed[: ctx.count], needed[ctx.count :]
        dx, dw, takes = None, [None] * ctx.count, call.product_takes
        dy = in_dtype(dy, call.dtype)
        if call.splits is not None:
            dy = dy.contiguous()
        if probed:
            call.probe_parts("grad_output", dy)
        row, column = (takes if needs_dx else None), (takes if any(needs_dw) else None)
        operands = call.quantize("grad_output", dy, rowwise=row, columnwise=column, by_rows=call.by_rows("wgrad"))
        if needs_dx:
            dx = call.product("dgrad", operands.rowwise, weight_column(state, tensors), call.dtype)
            if probed:
                call.probe_gemms("dgrad", call.parts(dy), [w.t() for w in probed[1]], call.parts(dx))
        if column:
            x_column = call.saved_input(state.parts(tensors)[1], state.skeleton)
            gradients = wgrad(state, operands.columnwise, x_column, may_add=not probed)
            if probed:
                probe_wgrad(call, dy, probed[0], gradients)
            dw = delivered(state, gradients, needs_dw)
        if needs_dx:
            dx = call.rounded("grad_input", dx)
        db = bias_gradients(call, dy, ctx.biases) if any(needs_db) else [None] * len(ctx.biases)
        return dx, None, None, None, *dw, *db
