"""The two linears of an MLP and the activation between them as one autograd function: on a GPU the activation, and its
gradient, are quantized as they are computed, and not written for a quantizer that would read them once.

Everything is to the byte what fc2(activate(fc1(x))) computes. Ranks may share the linears where a rank's part of the
activation, and of its gradient, is quantized alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hqsweep.nn.core.call import Call
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.products import once_differentiable, outside_autocast
from hqsweep.nn.core.residual import is_observed
from hqsweep.nn.linear.linear import NOTHING, Linear, as_rows
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.nn.linear.linear_function import (
    AnyOperand,
    Gradient,
    begin_dgrad,
    begin_input,
    check_weights,
    fprop,
    input_column,
    keep,
    one_wgrad,
    quantize_gradient,
    quantize_input,
    send_gradient,
)
from hqsweep.ops.model.activation import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.parallel.overlap.chunked_input import activated_in_turn
from hqsweep.parallel.overlap.deferred_reduce import LeftOutput
from hqsweep.parallel.overlap.prefetch import early_operand
from hqsweep.parallel.overlap.shared_linear import Exchange
from hqsweep.parallel.shards.shard_part import is_alone


class MLPFunction(torch.autograd.Function):
    """x [M, D], w1 [inputs * F, D], w2 [D, F] -> fc2(activation(fc1(x))) [M, D], in bfloat16 on CUDA. Of ranks that
    share the linears each has some of the F, and may have some of the tokens of x and of the output.

    It saves z = fc1(x) [M, inputs * F], and of fc1's and fc2's inputs what LinearFunction does. The calls are those of
    fc1 and fc2; they have no probe and no boundaries, and that of fc2 has no save_original.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, first: Call, second: Call, kind: str, ticket: Tensor | None, w1: Tensor, w2: Tensor
    ) -> Tensor:
        needs_dx, *_, needs_dw1, needs_dw2 = (needed and first.grad for needed in ctx.needs_input_grad)
        needs_dz = needs_dx or needs_dw1
        check_weights(first, (w1,), needs_dx, needs_dw1)
        column = input_column(first, needs_dw1)
        operands = quantize_input(first, x, column)
        z = fprop(first, (w1,), operands.rowwise, needs_dx)
        saved1, ctx.first = keep(first, (w1,), x if needs_dw1 else None, operands.columnwise, needs_dx)
        del operands  # an exact matrix, perhaps
        check_weights(second, (w2,), needs_dz, needs_dw2)
        column = input_column(second, needs_dw2)
        operands = activated_in_turn(second, z, kind, rowwise=second.product_takes, columnwise=column)
        y = fprop(second, (w2,), operands.rowwise, needs_dz)
        saved2, ctx.second = keep(second, (w2,), None, operands.columnwise, needs_dz)
        of_first = [partial(first.make_early, (w1,), "columnwise")] if needs_dx else []
        send_gradient(second, (w2,), rowwise=needs_dz, columnwise=needs_dw2, also=of_first)
        ctx.call, ctx.kind, ctx.count = first, kind, len(saved1)
        ctx.save_for_backward(*saved1, *saved2, *([z] if needs_dz else []))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        first, second, tensors = ctx.first, ctx.second, ctx.saved_tensors
        needs_dx, *_, is_late, needs_dw1, needs_dw2 = ctx.needs_input_grad
        needs_dz = needs_dx or needs_dw1
        dx = dticket = dw1 = dw2 = None
        takes = second.call.product_takes
        row, column = (takes if needs_dz else None), (takes if needs_dw2 else None)
        dy = in_dtype(dy, second.call.dtype)
        saved = tensors[ctx.count :]
        h_column = begin_input(second, saved) if needs_dw2 else None
        if needs_dw2 and second.call.left is not None:
            h_column = _ready(h_column())  # while dy is still on its way
        operands = quantize_gradient(second.call, dy, rowwise=row, columnwise=column)
        if needs_dz:
            dh = begin_dgrad(second, saved, operands.rowwise)()
        if needs_dw2:
            dw2 = one_wgrad(second, operands.columnwise, h_column)
            del h_column
        if not needs_dz:
            return None, None, None, None, None, None, dw2
        takes = first.call.product_takes
        row, column = (takes if needs_dx else None), (takes if needs_dw1 else None)
        is_late = is_late and needs_dx and needs_dw1
        x_column = begin_input(first, tensors) if needs_dw1 else None  # which arrives beside what follows
        operands = first.call.quantize_activated(
            "grad_output", tensors[-1], dh, ctx.kind, rowwise=row, columnwise=column
        )
        if needs_dx:  # and is summed beside a part of it, or beside wgrad
            dx_sum = begin_dgrad(first, tensors, operands.rowwise)
        if is_late:
            first.call.gradient.late = partial(one_wgrad, first, operands.columnwise, x_column)
            dticket = dy.new_empty(0)
        elif needs_dw1:
            dw1 = one_wgrad(first, operands.columnwise, x_column)
        if needs_dx:
            dx = first.call.gradient_of(dx_sum)
        return dx, None, None, None, dticket, dw1, dw2


def _ready(operand: AnyOperand) -> Callable[[], AnyOperand]:
    return lambda: operand


def joins(fc1: Linear, fc2: Linear, kind: str, x: Tensor) -> bool:
    """Whether joined() computes the MLP of x: it runs on hqsweep's CUDA kernels, for linears in bfloat16 that nobody
    observes and that are no more than quantizers and GEMMs, on one rank or by parts that are quantized alone."""
    if not use_kernels(x) or current().probe or is_observed(fc1) or is_observed(fc2) or fc2.save_original_input:
        return False
    quantizers = (fc1.active_quantizers(), fc2.active_quantizers())
    bounded = any(q is not None for section in quantizers for q in (section.output, section.grad_input))
    plain = fc1.bias is None and fc2.bias is None and fc1.dtype is fc2.dtype is torch.bfloat16
    features = fc1.own(fc1.weight).shape[0]
    return plain and not bounded and features % (8 * INPUTS[kind]) == 0 and _parts_are_alone(fc1, fc2, x, features)


def _parts_are_alone(fc1: Linear, fc2: Linear, x: Tensor, features: int) -> bool:
    """Whether a rank's part of the activation, and of its gradient [tokens, features], is quantized alone; True where
    this rank has all of them."""
    if fc1.parallel is None and fc2.parallel is None:
        return True
    first, second = _exchanges(fc1, fc2, x)
    if first is None or second is None or (first.parallel.mode, second.parallel.mode) != ("column", "row"):
        return False
    rows, width = math.prod(first.shape(x.shape[:-1])), fc2.own(fc2.weight).shape[1]
    of_input, of_gradient = fc2.active_quantizers().input, fc1.active_quantizers().grad_output
    both = ("codes", "codes")
    alone = is_alone(of_input, (rows, width), second.parts["input"], *both)
    return alone and is_alone(of_gradient, (rows, features), first.parts["grad_output"], *both)


def _exchanges(fc1: Linear, fc2: Linear, x: Tensor) -> Sequence[Exchange | None]:
    """What ranks exchange in the calls of both linears."""
    shape = x.shape[:-1]
    first = fc1.exchange(shape)
    return first, fc2.exchange(shape if first is None else first.shape(shape))


@outside_autocast
def joined(
    fc1: Linear,
    x: Tensor,
    fc2: Linear,
    kind: str,
    known: Mapping[str, Any] = NOTHING,
    left: LeftOutput | None = None,
) -> Tensor:
    """fc2(activation(fc1(x))) of x [..., D], where joins() says so. x is behind the norm of an fc1 that has one; known:
    the fields of a LinearCall that are known of it; left: where the output is left (Linear.branch)."""
    first, second = _exchanges(fc1, fc2, x)
    calls = (
        LinearCall(**fc1.linear_facts(), exchange=first, **known),
        LinearCall(**fc2.linear_facts(), exchange=second, left=left, early=early_operand(fc2)),
    )
    w1, ticket = fc1.own_weight(calls[0])
    y = MLPFunction.apply(input_in(as_rows(x), fc1.dtype, fc1.name), *calls, kind, ticket, w1, fc2.own(fc2.weight))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
