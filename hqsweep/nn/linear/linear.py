"""Linear: y = x @ w.T + b with each of its three GEMMs on operands of the recipe's formats."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.module import BOUNDARIES, Boundary, QuantizedModule
from hqsweep.nn.core.options import LinearOptions
from hqsweep.nn.core.parameter import AnyOperand, gemm_weight, is_held, link_states
from hqsweep.nn.core.products import outside_autocast, untraced
from hqsweep.nn.core.recipe_argument import RecipeArgument, module_quantizers
from hqsweep.nn.core.residual import is_observed
from hqsweep.nn.core.workspace import WeightWorkspace
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.nn.linear.linear_function import LinearFunction
from hqsweep.ops.quantize.kernels import input_in
from hqsweep.parallel.overlap.chunked_input import Turns
from hqsweep.parallel.overlap.deferred_reduce import LeftOutput
from hqsweep.parallel.overlap.prefetch import early_operand
from hqsweep.parallel.overlap.shared_linear import Exchange, TensorParallel, local
from hqsweep.parallel.wire.local import local as stored
from hqsweep.parallel.wire.tokens import Summands
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers

NOTHING: Mapping[str, Any] = MappingProxyType({})


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as a matrix; one that is there already costs autograd no node."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@outside_autocast
def linear_product(
    call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor | None = None
) -> Tensor:
    """y [..., N] of x [..., K], weight [N, K] and bias [N], in the dtype and by the quantizers of the call. With a
    ticket the gradient of the weight comes late (nn.left_sums)."""
    biases = () if bias is None else (bias,)
    rows = input_in(as_rows(x), call.dtype, call.name)
    y = call.rounded("output", LinearFunction.apply(rows, call, 1, ticket, weight, *biases))
    if x.dim() == 2:
        return y
    shape = x.shape[:-1]
    return y.view(*(call.exchange.shape(shape) if call.exchange else shape), y.shape[-1])


class LinearBase(QuantizedModule):
    """What single and grouped linears have in common: their settings, and the fields of a call."""

    BOUNDARIES = BOUNDARIES
    output_quantizer_role = Boundary("output")
    grad_input_quantizer_role = Boundary("grad_input")
    parallel: TensorParallel | None = None
    """How the ranks of a group share the linear; None: each has all of it."""
    weight_name: str | None = None
    """The attribute of a converted module that is the weight of this part of it; None for other linears."""

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
    With output_quantizer_role (grad_input_quantizer_role), the role of whoever reads y (dx), y (dx) is rounded to the
    rowwise values of that role's quantizer; gradients pass that rounding unchanged. UserError, at the call, for a held
    weight of another quantizer and for a missing main_grad.
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

    def branch(self, x: Tensor, turns: Turns | None = None) -> Tensor | Summands:
        """forward(x) for a norm that reads it next: Summands where it is a sum over ranks of rows of tokens. turns: how
        x is written, where there is a sum_left(), and part_in_turn() says so."""
        left = self.sum_left(x)
        if left is None:
            return self(x)
        known = {"left": left, "turns": [turns] if turns else [], "early": early_operand(self)}
        return left.take(self._product(x, known))

    def sum_left(self, x: Tensor) -> LeftOutput | None:
        """Where a call leaves the sum over ranks of its output; None where that is more than a sum, or is read by
        others than the caller."""
        plain = type(self).forward is Linear.forward and self.bias is None and not is_observed(self)
        shared = self.parallel is not None and self.parallel.sequence is not None
        if not (plain and shared and use_kernels(x)) or torch.compiler.is_compiling():
            return None
        return None if current().probe or self.active_quantizers().output is not None else LeftOutput()

    def _product(self, x: Tensor, known: Mapping[str, Any] = NOTHING) -> Tensor:
        """forward(x); `known` has the fields of a LinearCall that are known of its input."""
        if torch.compiler.is_compiling() and is_held([self.weight]):
            return self._product_untraced(x, known)
        call = LinearCall(**self.linear_facts(), exchange=self.exchange(x.shape[:-1]), **known)
        weight, ticket = self.own_weight(call)
        return linear_product(call, x, weight, self.own(self.bias), ticket)

    def exchange(self, shape: Sequence[int]) -> Exchange | None:
        """What ranks that share this linear exchange in a call with an input [*shape, K]; None where this rank has all
        of it."""
        if self.parallel is None:
            return None
        link_states([stored(self.weight)], self.states)  # and not a view of the part
        return self.parallel.exchange(shape)

    def early_operand(self, shape: Sequence[int]) -> AnyOperand | None:
        """The rowwise operand of the weight for a call with an input [*shape, K], before it is asked for; None where
        it is made of more than the weight, or somebody observes the call."""
        if is_observed(self):
            return None
        call = LinearCall(**self.linear_facts(), exchange=self.exchange(shape))
        call.make_early([self.own(self.weight)], "rowwise")
        return call.early.get("rowwise")

    def own_weight(self, call: LinearCall) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the weight for a call, and a ticket if its gradient is to come late."""
        return (self.own(self.weight), None) if call.gradient is None else call.gradient.ticket()

    def own(self, parameter: Tensor | None) -> Tensor | None:
        """This rank's part of a parameter of this linear, as its products take it."""
        return parameter if self.parallel is None or parameter is None else local(parameter)

    _product_untraced = untraced(_product)
    """A trace cannot take operands out of a weight that is held in them."""
