"""The three GEMMs of a grouped linear as one autograd function, with the rules of LinearFunction for each expert."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hqsweep.nn.grouped_call import GroupedCall, expert_weights, flatten_weights, unflatten_weights
from hqsweep.ops.plan import in_dtype
from hqsweep.quant.grouped_operand import flatten_group

Gradient = Tensor | None


class GroupedLinearFunction(torch.autograd.Function):
    """x [M, K], then the weights (one [E, N, K], or [N, K] for each expert), then the biases likewise, if there are any
    -> y [M, N]. Saved are the columnwise operands of x (with save_original x itself), and of the weights what
    flatten_weights gives."""

    @staticmethod
    def forward(ctx, x: Tensor, call: GroupedCall, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        needs_dx = ctx.needs_input_grad[0] and call.grad
        needs_dw = call.grad and any(ctx.needs_input_grad[3 : 3 + count])
        call.check_weights(weights, needs_dx, needs_dw)
        call.use_held(weights)
        column = "codes" if needs_dw and not call.save_original else None
        x_made = call.quantize("input", x, rowwise=call.product_takes, columnwise=column)
        ctx.sizes = (x.shape[1], weights[0].shape[-2])
        fprop = call.plan("fprop", ctx.sizes, x.device, call.dtype)
        ctx.dgrad = call.plan("dgrad", ctx.sizes, x.device, call.dtype) if needs_dx else None
        y = call.tokens(x_made.rowwise, call.weight(weights, "rowwise", ctx.dgrad), fprop)
        ctx.probed = _probe_forward(call, x, weights, y) if call.context.probe else None
        held, ctx.skeletons = flatten_weights(weights) if needs_dx else ([], [])
        kept = [x] if needs_dw and call.save_original else []
        saved, ctx.skeleton = flatten_group(x_made.columnwise) if column else (kept, None)
        ctx.call, ctx.held, ctx.count, ctx.is_single = call, len(held), count, weights[0].dim() == 3
        ctx.dw_dtype = torch.float32 if call.main_grad else weights[0].dtype
        ctx.weights = weights if call.main_grad else None
        ctx.biases = [(bias.dtype, bias.dim()) for bias in biases]
        ctx.save_for_backward(*held, *saved)
        return _add_biases(call, y, biases) if biases else y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, count = ctx.call, ctx.count
        tensors = ctx.saved_tensors
        held, saved = tensors[: ctx.held], tensors[ctx.held :]
        dy, dx = in_dtype(dy, call.dtype).contiguous(), None
        _probe_tensor(call, "grad_output", dy)
        needs_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        row, column = (call.product_takes if needed else None for needed in (needs_dx, any(needs[:count])))
        wgrad = call.plan("wgrad", ctx.sizes, dy.device, ctx.dw_dtype)
        dy_made = call.quantize("grad_output", dy, rowwise=row, columnwise=column, by_rows=wgrad.grouped)
        if needs_dx:
            w_column = call.weight(unflatten_weights(held, ctx.skeletons), "columnwise", ctx.dgrad)
            dx = call.tokens(dy_made.rowwise, w_column, ctx.dgrad)
            if ctx.probed:
                _probe_gemm(call, "dgrad", call.parts(dy), [w.t() for w in ctx.probed[1]], call.parts(dx))
        dw: list[Gradient] = [None] * count
        if any(needs[:count]):
            x_column = call.saved_input(saved, ctx.skeleton, wgrad)
            made = call.weight_gradients(dy_made.columnwise, x_column, wgrad, ctx.dw_dtype)
            if ctx.probed:
                dy_parts, x_parts = ([part.t() for part in call.parts(t)] for t in (dy, ctx.probed[0]))
                _probe_gemm(call, "wgrad", dy_parts, x_parts, made)
            dw = _delivered(made, ctx.weights, needs[:count], ctx.is_single)
        db = _bias_gradients(call, dy, ctx.biases) if any(needs[count:]) else [None] * len(ctx.biases)
        return dx, None, None, *dw, *db


def _delivered(
    made: Sequence[Tensor], weights: Sequence[Tensor] | None, needs: Sequence[bool], is_single: bool
) -> list[Gradient]:
    """Gradients of the weights as autograd takes them; None where main_grad has got them."""
    if weights is None and is_single:
        return [made if isinstance(made, Tensor) else torch.stack(list(made))]
    if weights is None:
        return [dw if needed else None for dw, needed in zip(made, needs, strict=True)]
    if is_single and isinstance(made, Tensor):
        weights[0].main_grad.add_(made)
        return [None]
    main_grads = weights[0].main_grad.unbind(0) if is_single else [weight.main_grad for weight in weights]
    needed = [i for i in range(len(made)) if needs[0 if is_single else i]]
    torch._foreach_add_([main_grads[i] for i in needed], [made[i] for i in needed])
    return [None] * len(needs)


def _add_biases(call: GroupedCall, y: Tensor, biases: Sequence[Tensor]) -> Tensor:
    rows, splits = biases[0] if biases[0].dim() == 2 else biases, call.splits
    if splits.sizes is None:  # nothing has to wait for them
        rows = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
        return y.add_(splits.spread(in_dtype(rows, call.dtype)))
    if splits.equal:
        rows = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
        y.view(splits.count, splits.equal, -1).add_(in_dtype(rows, call.dtype).unsqueeze(1))
        return y
    for part, bias in zip(call.parts(y), rows, strict=True):
        part.add_(in_dtype(bias, call.dtype))
    return y


def _bias_gradients(call: GroupedCall, dy: Tensor, biases: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Sums of the unquantized dy of each expert in float32. Of splits that only a device knows they are one sum a
    column, row by row (torch's SegmentReduce.cu: a thread for each), and not the tree of Tensor.sum."""
    (dtype, axes), splits = biases[0], call.splits
    if splits.sizes is None:
        offsets = splits.offsets(dy.device)  # unsafe: unchecked, for a check waits
        sums = torch.segment_reduce(dy.float(), "sum", offsets=offsets, axis=0, unsafe=True).to(dtype)
        return [sums] if axes == 2 else list(sums.unbind(0))
    sums = [part.sum(dim=0, dtype=torch.float32) for part in call.parts(dy)]
    return [in_dtype(torch.stack(sums), dtype)] if axes == 2 else [in_dtype(own, dtype) for own in sums]


def _probe_forward(call: GroupedCall, x: Tensor, weights: Sequence[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Report what forward has; x and the weights are what backward compares with."""
    _probe_tensor(call, "input", x)
    own = [expert.probe_weight(w) for expert, w in zip(call.experts, expert_weights(weights), strict=True)]
    _probe_gemm(call, "fprop", call.parts(x), own, call.parts(y))
    return x, own


def _probe_tensor(call: GroupedCall, tensor: str, x: Tensor) -> None:
    """The rows of each expert that has any."""
    if call.context.probe:
        for expert, part in zip(call.experts, call.parts(x), strict=True):
            if len(part):
                expert.probe_tensor(tensor, part)


def _probe_gemm(
    call: GroupedCall, gemm: str, a: Sequence[Tensor], b: Sequence[Tensor], actual: Sequence[Tensor]
) -> None:
    for expert, (start, end), *facts in zip(call.experts, call.splits.spans, a, b, actual, strict=True):
        if end > start:
            expert.probe_gemm(gemm, *facts)
