"""LinearCall: a call of a linear with one weight matrix, or with one for each expert, and the arithmetic of the call.

The arithmetic is three GEMMs on operands, what backward needs, and biases. LinearFunction calls it in order on one
rank. Where ranks share a linear, hqsweep.parallel.shared.linear calls it in an order that hides exchanges. With experts
each has its own rows of x and dy, its own w and its own b; without, all is one matrix.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import add_mm_t, mm_t
from hqsweep.gemm.grouped import mm_t_tokens, mm_t_weights
from hqsweep.gemm.native import multiply
from hqsweep.gemm.plan import GemmPlan
from hqsweep.memo import cached_property
from hqsweep.nn.core.call import Call
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    are_filled_again,
    check_held,
    check_main_grad,
    expert_weights,
    flatten_weights,
    held_operands,
    is_gathered,
    is_held,
    link_states,
    summed_main_grad,
    unflatten_weights,
    weight_matrix,
)
from hqsweep.nn.core.workspace import WeightWorkspace
from hqsweep.ops.quantize.fused import Normed
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.hybrid import DIRECTIONS, Direction
from hqsweep.quant.operand import HybridOperand, Skeleton, flatten, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.torch_private import foreach_add_

PRODUCTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "weight"}
"""GEMM -> the tensor that it computes, or whose gradient it computes. Ranks share the result like that tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownInput:
    """Facts of a linear's input x that are known before it is quantized."""

    amaxes: Sequence[Tensor] = ()
    """The known amaxes of x (HybridQuantizer.takes_amaxes)."""
    normed: Normed | None = None
    """The norm's input, from which x is computed; x itself then has no values."""


NOTHING = KnownInput()


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call):
    """A call of a linear. With one matrix, splits and plans are None, and every list of this class has one entry."""

    quantizers: LinearQuantizers
    main_grad: bool
    """Whether dw is added to weight.main_grad."""
    save_original: bool
    """Whether x is saved instead of its columnwise operand, which is then made in backward."""
    workspace: WeightWorkspace | None
    plans: Mapping[str, GemmPlan] | None = None
    """"fprop", "dgrad" and "wgrad" -> the plan that computes the product of all experts."""
    made_together: ClassVar[bool] = False
    """Whether other ranks make operands of their parts of the weight at the same time."""

    @cached_property
    def singles(self) -> Sequence["LinearCall"]:
        """The calls of the experts, each as a separate linear would make it."""
        if self.splits is None:
            return (self,)
        alone = {"splits": None, "weight_splits": None, "plans": None, "workspace": None}
        numbered = enumerate(self.states, self.first_expert)
        return [replace(self, expert=expert, states=states, **alone) for expert, states in numbered]

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the rows of each expert. Waits for splits that only a device knows."""
        return [x] if self.splits is None else [x[start:end] for start, end in self.splits.spans]

    def by_rows(self, gemm: str) -> bool:
        """Whether the GEMM takes exact columns of experts as torch._grouped_mm does."""
        return self.plans is not None and self.plans[gemm].one_kernel

    def quantize_input(
        self, x: Tensor, known: KnownInput, *, rowwise: Output | None, columnwise: Output | None
    ) -> HybridOperand:
        """Return quantize("input", x). An x without values is quantized from the norm's input."""
        if known.normed is not None:
            return self._quantize_normed("input", x, known.normed, rowwise=rowwise, columnwise=columnwise)
        return self.quantize("input", x, rowwise=rowwise, columnwise=columnwise, amaxes=known.amaxes)

    @for_its_slot
    def _quantize_normed(self, tensor: str, x: Tensor, of: Normed, **outputs: Output | None) -> HybridOperand:
        return self.quantizer(tensor).quantize_normed(of, **outputs)

    def summed(self, tensor: str, x: Tensor) -> Tensor:
        """Return x [rows, C] of this call; if ranks have parts of its sums, the sum over ranks."""
        return x

    def product(self, gemm: str, a: AnyOperand, b: AnyOperand, out_dtype: torch.dtype) -> Tensor | Sequence[Tensor]:
        """Return the product of a and b: "fprop", "dgrad" or "wgrad", the last one for each expert.

        UserError, with the module's name, for operands that gemm=native cannot multiply.
        """
        if self.context.reader is not None:
            self.context.reader(self, gemm, a, b)
        if self.plans is None and self.gemm != "native":
            return mm_t(a, b, out_dtype=out_dtype)
        try:
            if self.plans is None:
                return multiply(a, b, self.gemm, out_dtype)
            of_group = mm_t_weights if gemm == "wgrad" else mm_t_tokens
            return of_group(a, b, self.plans[gemm], out_dtype=out_dtype)
        except UserError as error:
            raise UserError(f"{self.layer}: {error}") from None

    def weight(self, weights: Weights, direction: Direction, *, needs_dx: bool = False) -> AnyOperand:
        """Return the operand of one direction: the held one, or one made of the weights in self.dtype.

        The workspace, if there is one, keeps it. needs_dx: dgrad will ask for the columnwise operand, so that the
        workspace makes both from one read of the weights.
        """
        if is_held(weights):
            return held_operands(weights, direction)
        takes, by_rows = self.product_takes, self.plans is not None and self.plans["dgrad"].one_kernel

        def make(directions: Collection[Direction], output: Output = takes) -> HybridOperand:
            outputs = dict.fromkeys(directions, output)
            return self.quantize("weight", weight_matrix(weights, self.dtype), **outputs, by_rows=by_rows)

        needs_column = needs_dx or direction == "columnwise"
        if is_gathered(weights) and not torch.compiler.is_compiling():
            return weights[0].gathering.operand(self, weights, direction, make, needs_column=needs_column)
        if self.workspace is None:
            return getattr(make([direction]), direction)
        forms: dict[Direction, Hashable] = {direction: takes}
        if needs_column:
            forms["columnwise"] = (takes, by_rows)
        kept = {"together": self.made_together, "period": self.context.period}
        return self.workspace.take(weights, forms, self.quantizers.weight, self.key("weight"), make, **kept)

    def check_weights(self, weights: Weights, needs_dx: bool, needs_dw: bool) -> None:
        """Raise UserError, with the module's name, for weights that one of the GEMMs cannot use.

        Also notes that a step uses weights held in fp8_delayed.
        """
        owners = [self] if len(weights) == 1 and weights[0].dim() == 3 else self.singles
        for call, weight in zip(owners, weights, strict=True):
            try:
                if isinstance(weight, HybridQuantizedTensor):
                    for direction in DIRECTIONS[: 1 + needs_dx]:
                        check_held(weight, direction, self.quantizers.weight)
                if self.main_grad and needs_dw and weight.requires_grad:
                    check_main_grad(weight)
            except UserError as error:
                raise UserError(f"{call.layer}: {error}") from None
        if is_held(weights) and weights[0].quantizer.delayed:
            for states in link_states(weights, self.states):
                replace(states, **self.recording).use()

    def saved_input(self, tensors: Sequence[Tensor], skeleton: Skeleton | None) -> AnyOperand:
        """Return the columnwise operand of x, made from the saved tensors."""
        if skeleton is not None:
            return unflatten(tensors, skeleton)
        outputs = {"columnwise": self.product_takes, "by_rows": self.by_rows("wgrad")}
        return self.quantize("input", tensors[0], **outputs).columnwise

    def probe_forward(self, x: Tensor, weights: Weights, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Report the tensors of forward. Returns x and the weights in high precision, with which backward compares."""
        self.probe_parts("input", x)
        originals = [call._probe_weight(w) for call, w in zip(self.singles, expert_weights(weights), strict=True)]
        self.probe_gemms("fprop", self.parts(x), originals, self.parts(y))
        return x, originals

    def probe_parts(self, tensor: str, x: Tensor) -> None:
        """Report the rows of each expert that has any."""
        for call, part in zip(self.singles, self.parts(x), strict=True):
            if len(part):
                call.probe_tensor(tensor, part)

    def probe_gemms(self, gemm: str, a: Sequence[Tensor], b: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
        """Report the GEMM of each expert with rows, of unquantized a [m, k] and b [n, k].

        `actual` is summed over ranks if each has a part of the products.
        """
        probe, tensor = self.context.probe, PRODUCTS[gemm]
        for call, left, right, product in zip(self.singles, a, b, actual, strict=True):
            if probe and left.numel():
                site = call.site(gemm, call.part_of(tensor, product))
                probe.gemm(site, left, right, product, partial(call.summed, tensor))

    def _probe_weight(self, weight: Tensor) -> Tensor:
        """Return the high-precision weight to report.

        For a held quantized weight, this is the probe's original of the layer. Without an original, errors of GEMMs are
        taken against the held values, and the weight has no error row.
        """
        if isinstance(weight, HybridQuantizedTensor):
            original = self.context.probe.originals.get(self.layer)
            if original is None:
                return weight.dequantize(self.dtype)
            weight = original if weight.part is None else weight.part.own(original, weight.part.axis)
        weight = weight.to(self.dtype)
        self.probe_tensor("weight", weight)
        return weight


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
