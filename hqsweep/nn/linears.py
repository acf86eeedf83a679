"""Linear: y = x @ w.T + b with each of its three GEMMs on operands of the recipe's formats.

LinearFunction calls the arithmetic here in order on one rank: three GEMMs, what backward needs, and biases. Where ranks
share a linear, hqsweep.parallel.shared.linear calls it in an order that hides exchanges. With experts each has its own
rows of x and dy, its own w and its own b; without, all is one matrix.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import add_mm_t
from hqsweep.nn.core.call import NOTHING, KnownInput, LinearCall
from hqsweep.nn.core.guards import once_differentiable, outside_autocast, returned, untraced
from hqsweep.nn.core.module import BOUNDARIES, Boundary, QuantizedModule
from hqsweep.nn.core.options import LinearOptions, gemm_weight
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    WeightWorkspace,
    are_filled_again,
    flatten_weights,
    is_held,
    link_states,
    summed_main_grad,
    unflatten_weights,
)
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.core.wire import LinearRanks
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.operand import Skeleton, flatten
from hqsweep.recipe.argument import RecipeArgument, module_quantizers
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers
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


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as a matrix. A matrix is returned as it is, without a node of autograd."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class LinearFunction(torch.autograd.Function):
    """x [M, K], the call, KnownInput, the number of weights ([N, K] each, or one [E, N, K]), the weights, and as many
    biases, if any -> y [M, N].

    It saves x's columnwise operand as codes, or x itself with save_original. Of the weights it saves the tensors of
    flatten_weights: held columnwise operands, or the weights, from which backward makes the operands again.
    """

    @staticmethod
    def forward(ctx, *arguments: Any) -> Tensor:
        # Without gradients Dynamo leaves out ctx if it counts as many arguments as names, so names are few.
        x, call, known, count, *parameters = arguments
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
            if call.waiting is None:
                gradients = wgrad(state, operands.columnwise, x_column, may_add=not probed)
                if probed:
                    probe_wgrad(call, dy, probed[0], gradients)
                dw = delivered(state, gradients, needs_dw)
            else:
                call.waiting.append(partial(weight_gradients, state, operands.columnwise, x_column, needs_dw))
        if needs_dx:
            dx = call.rounded("grad_input", dx)
        db = bias_gradients(call, dy, ctx.biases) if any(needs_db) else [None] * len(ctx.biases)
        return dx, None, None, None, *dw, *db


@outside_autocast
def linear_product(
    call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, known: KnownInput = NOTHING
) -> Tensor:
    """Return y [..., N] of x [..., K], weight [N, K] and bias [N], in the call's dtype and by its quantizers.

    known: facts of x that are known before it is quantized.
    """
    biases = () if bias is None else (bias,)
    rows = input_in(as_rows(x), call.dtype, call.name)
    y = call.rounded("output", LinearFunction.apply(rows, call, known, 1, weight, *biases))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


class LinearBase(QuantizedModule):
    """Base of single and grouped linears: their settings, and the fields of a call."""

    BOUNDARIES = BOUNDARIES
    output_quantizer_role = Boundary("output")
    grad_input_quantizer_role = Boundary("grad_input")
    parallel: LinearRanks | None = None
    """How ranks share the linear, and compute it; None: this rank has all of it."""
    weight_name: str | None = None
    """The name of the weight in a converted module, for this part of it; None for other linears."""

    def __init__(
        self,
        name: str,
        quantizers: LinearQuantizers,
        gemm: str,
        dtype: torch.dtype,
        options: LinearOptions,
    ) -> None:
        super().__init__()
        self.name = name
        self.quantizers = quantizers
        self.gemm = gemm
        self.dtype = dtype
        self.fuse_wgrad_accumulation = options.fuse_wgrad_accumulation
        self.save_original_input = options.save_original_input
        self.workspace = WeightWorkspace()

    def linear_facts(self) -> dict[str, Any]:
        """The fields of a LinearCall, as they are now."""
        fields = self.call_facts()
        tracing = torch.compiler.is_compiling()  # a trace cannot ask whether somebody has written to a weight
        cache = fields["context"].cache_weights and not tracing
        if not cache and not tracing:
            self.workspace.clear()
        fields["main_grad"] = self.fuse_wgrad_accumulation
        fields["save_original"] = self.save_original_input and fields["quantizers"].input.may_save_original
        fields["workspace"] = self.workspace if cache else None
        return fields

    def extra_repr(self) -> str:
        q = self.quantizers
        return f"{self.name}: input {q.input}, weight {q.weight}, grad_output {q.grad_output}"


class Linear(LinearBase):
    """y [..., N] = x [..., K] @ weight [N, K].T (+ bias [N]).

    recipe: a Recipe or CustomRecipe, LinearQuantizers, or the text or mapping of one: "mxfp8" is for all three tensors.
    x and weight are rounded to `dtype` before they are quantized, and y and dx are returned in `dtype`. The weight
    itself stays in its own dtype (FP32 master) and receives dw in it, unrounded. The gradient of the bias is the sum of
    the unquantized dy in float32. Inside quantized_model_init the weight is a HybridQuantizedTensor, whose operands are
    multiplied as they are. The role of each slot is QuantizerRole("linear", tensor, name).

    output_quantizer_role is the role of the module that reads y: y is rounded to the rowwise values of that role's
    quantizer. grad_input_quantizer_role does the same for dx. Gradients pass the rounding unchanged. UserError, at the
    call, for a held weight of another quantizer and for a missing main_grad.
    """

    module_type = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: LinearOptions = LinearOptions(),
    ) -> None:
        quantizers, gemm = module_quantizers(recipe, self.module_type, name)
        super().__init__(name, quantizers, gemm, dtype, options)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        weight = nn.init.normal_(torch.empty(out_features, in_features), std=1 / math.sqrt(in_features))
        role = QuantizerRole("linear", "weight", name)
        self.weight = gemm_weight(weight, quantizers.weight, role, dtype, self.states)

    def reset_parameters(self) -> None:
        """Draw the weight again, and zero the bias."""
        for state in self.states.values():
            state.reset_parameters()
        link_states([self.weight], self.states)
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    def branch(self, x: Tensor) -> Branch:
        """Return forward(x) for a norm that reads it next. If y is a sum over ranks, the norm may add the summands."""
        return self(x) if self.parallel is None else self.parallel.branch(self, x)

    def _product(self, x: Tensor, known: KnownInput = NOTHING) -> Tensor:
        """Return forward(x). known: facts of x that are known before it is quantized."""
        if torch.compiler.is_compiling() and is_held([self.weight]):
            return self._product_untraced(x, known)
        if self.parallel is not None:
            return self.parallel.product(self, x, known)
        return linear_product(LinearCall(**self.linear_facts()), x, self.weight, self.bias, known)

    _product_untraced = untraced(_product)
    """A trace cannot take operands out of a weight that is held in them."""
