"""The three GEMMs of a linear as one autograd function: y = x @ w.T + b, and from dy: dx = dy @ w, dw = dy.T @ x.

With experts each has its own rows of x and dy, its own w and its own b; without, all is one matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hqsweep.nn.call import Call
from hqsweep.nn.parameter import flatten_weights, is_held, unflatten_weights
from hqsweep.nn.products import once_differentiable
from hqsweep.ops.kernels import in_dtype
from hqsweep.quant.operand import flatten

Gradient = Tensor | None


class LinearFunction(torch.autograd.Function):
    """x [M, K], then `count` weights ([N, K] each, or one [E, N, K]), then the biases likewise, if any -> y [M, N].

    Saves of x its columnwise operand as codes (with save_original x itself), and of the weights what flatten_weights
    gives: the columnwise operands that are held, or the weights themselves, of which they are made again in backward.
    call: a LinearCall, which has what is asked of it here beyond a Call.
    """

    @staticmethod
    def forward(ctx, x: Tensor, call: Call, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        needs_dx = ctx.needs_input_grad[0] and call.grad
        needs_dw = call.grad and any(ctx.needs_input_grad[3 : 3 + count])
        held = is_held(weights)
        if held or call.main_grad:
            call.check_weights(weights, needs_dx, needs_dw)
        column = "codes" if needs_dw and not call.save_original else None
        operands = call.quantize("input", x, rowwise=call.product_takes, columnwise=column)
        y = call.product("fprop", operands.rowwise, call.weight(weights, "rowwise", needs_dx=needs_dx), call.dtype)
        ctx.probed = call.probe_forward(x, weights, y) if call.context.probe else None
        of_weights, ctx.weight_skeletons = flatten_weights(weights) if held and needs_dx else (weights, ())
        of_weights = of_weights if needs_dx else ()
        saved, ctx.skeleton = flatten(operands.columnwise) if column else ([x] if needs_dw else (), None)
        ctx.call, ctx.count, ctx.of_weights = call, count, len(of_weights)
        ctx.one_parameter = call.splits is None or weights[0].dim() == 3
        ctx.dw_dtype = torch.float32 if call.main_grad else weights[0].dtype
        ctx.weights = weights if call.main_grad else None
        ctx.biases = [(bias.dtype, bias.dim()) for bias in biases] if biases else ()
        ctx.save_for_backward(*of_weights, *saved)
        return _add_biases(call, y, biases) if biases else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, count, needs_dx = ctx.call, ctx.count, ctx.needs_input_grad[0]
        needs_dw, needs_db = ctx.needs_input_grad[3 : 3 + count], ctx.needs_input_grad[3 + count :]
        tensors, dx = ctx.saved_tensors, None
        of_weights, saved = tensors[: ctx.of_weights], tensors[ctx.of_weights :]
        dy = in_dtype(dy, call.dtype) if call.splits is None else in_dtype(dy, call.dtype).contiguous()
        if ctx.probed:
            call.probe_parts("grad_output", dy)
        row, column = (call.product_takes if needs_dx else None), (call.product_takes if any(needs_dw) else None)
        operands = call.quantize("grad_output", dy, rowwise=row, columnwise=column, by_rows=call.by_rows("wgrad"))
        if needs_dx:
            skeletons = ctx.weight_skeletons
            w_column = unflatten_weights(of_weights, skeletons) if skeletons else call.weight(of_weights, "columnwise")
            dx = call.product("dgrad", operands.rowwise, w_column, call.dtype)
            if ctx.probed:
                call.probe_gemms("dgrad", call.parts(dy), [w.t() for w in ctx.probed[1]], call.parts(dx))
            dx = call.rounded("grad_input", dx)
        dw: Sequence[Gradient] = [None] * count
        if column:
            x_column = call.saved_input(saved, ctx.skeleton)
            gradients = call.product("wgrad", operands.columnwise, x_column, ctx.dw_dtype)
            if ctx.probed:
                _probe_wgrad(call, dy, ctx.probed[0], gradients)
            dw = _delivered(gradients, ctx.weights, needs_dw, ctx.one_parameter)
        db = _bias_gradients(call, dy, ctx.biases) if any(needs_db) else [None] * len(ctx.biases)
        return dx, None, None, *dw, *db


def _delivered(
    gradients: Tensor | Sequence[Tensor], weights: Sequence[Tensor] | None, needs: Sequence[bool], one_parameter: bool
) -> list[Gradient]:
    """Gradients of the weights as autograd takes them; None where main_grad has got them. one_parameter: there is one
    weight, and all gradients are its own."""
    whole = one_parameter and isinstance(gradients, Tensor)
    if weights is None and one_parameter:
        return [gradients if whole else torch.stack(list(gradients))]
    if weights is None:
        return [dw if needed else None for dw, needed in zip(gradients, needs, strict=True)]
    if whole:
        weights[0].main_grad.add_(gradients)
        return [None]
    main_grads = weights[0].main_grad.unbind(0) if one_parameter else [weight.main_grad for weight in weights]
    needed = [i for i in range(len(gradients)) if needs[0 if one_parameter else i]]
    torch._foreach_add_([main_grads[i] for i in needed], [gradients[i] for i in needed])
    return [None] * len(needs)


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
    """Sums of the unquantized dy in float32, for each expert. Of splits that only a device knows they are one sum a
    column, row by row (torch's SegmentReduce.cu: a thread for each), and not the tree of Tensor.sum."""
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
