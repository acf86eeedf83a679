"""The arithmetic of a linear's autograd functions: its three GEMMs on operands, what backward needs, and biases.

LinearFunction calls it in order on one rank. Where ranks share a linear, hqsweep.parallel.shared.linear calls it in an
order that hides exchanges. With experts each has its own rows of x and dy, its own w and its own b; without, all is one
matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import add_mm_t
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    are_filled_again,
    flatten_weights,
    is_held,
    summed_main_grad,
    unflatten_weights,
)
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.operand import Skeleton, flatten
from hqsweep.torch_private import foreach_add_

Gradient = Tensor | None


class BackwardState(NamedTuple):
    """The facts that backward needs beside the saved tensors. `of_weights` and `of_input` describe these tensors."""

    call: LinearCall
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

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the saved tensors of the weights, and the saved tensors of x."""
        return self.own or tensors[: self.of_weights], tensors[self.of_weights : self.of_weights + self.of_input]


def rows_of(operand: ExactOperand, start: int, stop: int) -> ExactOperand:
    """Rows of an exact operand, as views."""
    factor = operand.factor
    factor = factor if factor is None or factor.numel() == 1 else factor[start:stop]
    return ExactOperand(operand.matrix[start:stop], factor, operand.divisor)


def input_column(call: LinearCall, needs_dw: bool) -> Output | None:
    """The columnwise output of x that forward makes, to be saved."""
    return "codes" if needs_dw and not call.save_original else None


def check_weights(call: LinearCall, weights: Weights, needs_dx: bool, needs_dw: bool) -> None:
    """UserError for weights that one of the GEMMs could not use."""
    if is_held(weights) or call.main_grad:
        call.check_weights(weights, needs_dx, needs_dw)


def keep(
    call: LinearCall, weights: Weights, x: Tensor | None, column: AnyOperand | None, needs_dx: bool
) -> tuple[list[Tensor], BackwardState]:
    """Return the tensors to save, and the state that backward needs.

    column: x's columnwise operand as codes. Without it x itself is saved, or nothing if there is no x.
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
    )
    return [*of_weights, *saved], state


def weight_column(state: BackwardState, tensors: Sequence[Tensor]) -> AnyOperand:
    """The columnwise operand of the weights, for dgrad. tensors: what keep() gave."""
    of_weights, _ = state.parts(tensors)
    if state.weight_skeletons:
        return unflatten_weights(of_weights, state.weight_skeletons)
    return state.call.weight(of_weights, "columnwise")


def wgrad(
    state: BackwardState, dy: AnyOperand, x: AnyOperand, *, may_add: bool = True
) -> Tensor | Sequence[Tensor] | None:
    """Return dw of each expert, from the columnwise operands of dy and x.

    None if the GEMM has added dw to main_grad. may_add=False prevents that.
    """
    call = state.call
    if may_add and state.weights is not None and call.plans is None and call.gemm != "native":
        add_mm_t(summed_main_grad(state.weights[0]), dy, x)
        return None
    return call.product("wgrad", dy, x, state.dw_dtype)


def delivered(
    state: BackwardState, gradients: Tensor | Sequence[Tensor] | None, needs: Sequence[bool]
) -> list[Gradient]:
    """Return the gradients of the weights as autograd takes them: None for gradients that main_grad has."""
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


def weight_gradients(state: BackwardState, dy: AnyOperand, x: AnyOperand, needs: Sequence[bool]) -> list[Gradient]:
    """wgrad() and delivered() in one call, for a backward that leaves them to later."""
    return delivered(state, wgrad(state, dy, x), needs)


def add_biases(call: LinearCall, y: Tensor, biases: Sequence[Tensor]) -> Tensor:
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


def bias_gradients(call: LinearCall, dy: Tensor, biases: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Return the sum of the unquantized dy in float32, for each expert.

    If only a device knows the splits, each column is summed row by row (a thread each in torch's SegmentReduce.cu), not
    in the tree of Tensor.sum.
    """
    (dtype, axes), splits = biases[0], call.splits
    if splits is not None and splits.sizes is None:
        offsets = splits.offsets(dy.device)  # unsafe: unchecked, for a check waits
        sums = torch.segment_reduce(dy.float(), "sum", offsets=offsets, axis=0, unsafe=True).to(dtype)
        return [sums] if axes == 2 else list(sums.unbind(0))
    sums = [part.sum(dim=0, dtype=torch.float32) for part in call.parts(dy)]
    return [in_dtype(torch.stack(sums), dtype)] if axes == 2 else [in_dtype(own, dtype) for own in sums]


def probe_wgrad(call: LinearCall, dy: Tensor, x: Tensor, gradients: Tensor | Sequence[Tensor]) -> None:
    of_experts = [gradients] if call.splits is None else gradients
    dy_parts, x_parts = ([part.t() for part in call.parts(tensor)] for tensor in (dy, x))
    call.probe_gemms("wgrad", dy_parts, x_parts, of_experts)
