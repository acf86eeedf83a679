"""Linear: y = x @ w.T + b with each of its three GEMMs on operands of the recipe's formats."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.model_init import gemm_weight
from hqsweep.nn.core.module import BOUNDARIES, Boundary, QuantizedModule
from hqsweep.nn.core.options import LinearOptions
from hqsweep.nn.core.parameter import is_held, link_states
from hqsweep.nn.core.products import once_differentiable, outside_autocast, returned, untraced
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.core.wire import LinearRanks
from hqsweep.nn.core.workspace import WeightWorkspace
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
    weight_gradients,
    wgrad,
)
from hqsweep.nn.linear.linear_call import NOTHING, KnownInput, LinearCall
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.recipe.argument import RecipeArgument, module_quantizers
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as a matrix. A matrix is returned as it is, without a node of autograd."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


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
