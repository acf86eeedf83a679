"""SharedMLPFunction: MLPFunction of shared linears, in an order that hides the exchanges of their ranks.

A rank's part of the activation, and of its gradient, is quantized alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hqsweep.nn.core.parameter import AnyOperand
from hqsweep.nn.core.products import once_differentiable
from hqsweep.nn.linear.gemms import Gradient, check_weights, input_column, keep
from hqsweep.nn.linear.linear import Linear
from hqsweep.ops.model.activation import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.parallel.overlap.chunked_input import activated_in_turn
from hqsweep.parallel.shards.shard_part import is_alone
from hqsweep.parallel.shared.call import SharedCall
from hqsweep.parallel.shared.linear_function import Handover, begin_input, one_wgrad, stays
from hqsweep.parallel.shared.tokens import local


@dataclass(frozen=True, kw_only=True, eq=False)
class MLPCall:
    """The calls of fc1 and fc2, and the Handover of each. They have no probe and no boundaries."""

    first: SharedCall
    second: SharedCall
    first_handover: Handover
    second_handover: Handover
    kind: str
    """The activation."""

    @property
    def name(self) -> str:
        """The name of fc1."""
        return self.first.name


class SharedMLPFunction(torch.autograd.Function):
    """x [M, D], w1 [inputs * F, D], w2 [D, F] -> fc2(activation(fc1(x))) [M, D], with F shared over ranks.

    Ranks may also share the tokens of x and of the output. With a ticket the gradient of w1 comes late.
    """

    @staticmethod
    def forward(ctx, x: Tensor, call: MLPCall, ticket: Tensor | None, w1: Tensor, w2: Tensor) -> Tensor:
        first, second, of_first, of_second = call.first, call.second, call.first_handover, call.second_handover
        needs_dx, *_, needs_dw1, needs_dw2 = (needed and first.grad for needed in ctx.needs_input_grad)
        needs_dz = needs_dx or needs_dw1
        check_weights(first, (w1,), needs_dx, needs_dw1)
        operands = of_first.quantize_input(first, x, input_column(first, needs_dw1))
        z = of_first.fprop(first, (w1,), operands.rowwise, needs_dx)
        saved1, ctx.first = keep(first, (w1,), x if needs_dw1 else None, operands.columnwise, needs_dx)
        del operands  # an exact matrix, perhaps
        check_weights(second, (w2,), needs_dz, needs_dw2)
        column = input_column(second, needs_dw2)
        operands = activated_in_turn(second, z, call.kind, rowwise=second.product_takes, columnwise=column)
        y = of_second.fprop(second, (w2,), operands.rowwise, needs_dz)
        saved2, ctx.second = keep(second, (w2,), None, operands.columnwise, needs_dz)
        also = [partial(of_first.early.make, first, (w1,), "columnwise")] if needs_dx else []
        if of_first.layer is not None:
            of_first.layer = None
        of_second.send_gradient(second, (w2,), rowwise=needs_dz, columnwise=needs_dw2, also=also)
        ctx.call, ctx.count, ctx.stays = call, len(saved1), (stays(first), stays(second))
        ctx.save_for_backward(*saved1, *saved2, *([z] if needs_dz else []))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        first, second, of_first, of_second = call.first, call.second, call.first_handover, call.second_handover
        needs_dx, _, is_late, needs_dw1, needs_dw2 = ctx.needs_input_grad
        needs_dz, saved = needs_dx or needs_dw1, tensors[ctx.count :]
        dx = dticket = dw1 = dw2 = None
        takes = second.product_takes
        row, column = (takes if needs_dz else None), (takes if needs_dw2 else None)
        dy = in_dtype(dy, second.dtype)
        h_column = begin_input(ctx.second, saved, early=ctx.stays[1]) if needs_dw2 else None
        if needs_dw2 and of_second.left is not None:
            h_column = _ready(h_column())  # while dy is still on its way
        operands = of_second.quantize_gradient(second, dy, rowwise=row, columnwise=column)
        if needs_dz:
            dh = of_second.begin_dgrad(ctx.second, saved, operands.rowwise)()
        if needs_dw2:
            dw2 = one_wgrad(ctx.second, operands.columnwise, h_column)
            del h_column
        if not needs_dz:
            return None, None, None, None, dw2
        takes = first.product_takes
        row, column = (takes if needs_dx else None), (takes if needs_dw1 else None)
        is_late = is_late and needs_dx and needs_dw1
        x_column = begin_input(ctx.first, tensors, early=ctx.stays[0]) if needs_dw1 else None  # beside what follows
        operands = first.quantize_activated("grad_output", tensors[-1], dh, call.kind, rowwise=row, columnwise=column)
        if needs_dx:  # and is summed beside a part of it, or beside wgrad
            dx_sum = of_first.begin_dgrad(ctx.first, tensors, operands.rowwise)
        if is_late:
            of_first.gradient.late = partial(one_wgrad, ctx.first, operands.columnwise, x_column)
            dticket = dy.new_empty(0)
        elif needs_dw1:
            dw1 = one_wgrad(ctx.first, operands.columnwise, x_column)
        if needs_dx:
            dx = of_first.gradient_of(first, dx_sum)
        return dx, None, dticket, dw1, dw2


def _ready(operand: AnyOperand) -> Callable[[], AnyOperand]:
    return lambda: operand


def parts_are_alone(fc1: Linear, fc2: Linear, kind: str, x: Tensor) -> bool:
    """Return whether a rank quantizes its part of the activation, and of its gradient [tokens, features], alone."""
    features, width = local(fc1.weight).shape[0], local(fc2.weight).shape[1]
    if features % (8 * INPUTS[kind]) or (fc1.parallel.mode, fc2.parallel.mode) != ("column", "row"):
        return False
    first = fc1.parallel.exchange(x.shape[:-1])
    shape = first.shape(x.shape[:-1])
    rows, second = math.prod(shape), fc2.parallel.exchange(shape)
    of_input, of_gradient = fc2.active_quantizers().input, fc1.active_quantizers().grad_output
    both = ("codes", "codes")
    alone = is_alone(of_input, (rows, width), second.parts["input"], *both)
    return alone and is_alone(of_gradient, (rows, features), first.parts["grad_output"], *both)
