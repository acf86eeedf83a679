"""LinearCall: a call of a linear with one weight matrix, or with one for each expert."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.grouped import mm_t_tokens, mm_t_weights
from hqsweep.gemm.native import multiply
from hqsweep.gemm.plan import GemmPlan
from hqsweep.memo import cached_property
from hqsweep.nn.core.call import Call
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    check_held,
    check_main_grad,
    expert_weights,
    held_operands,
    is_gathered,
    is_held,
    link_states,
    weight_matrix,
)
from hqsweep.nn.core.workspace import WeightWorkspace
from hqsweep.ops.quantize.fused import Normed
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.hybrid import DIRECTIONS, Direction
from hqsweep.quant.operand import HybridOperand, Skeleton, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.sections import LinearQuantizers

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
    waiting: list[Callable[[], list[Tensor | None]]] | None = None
    """Where backward puts functions that compute the gradients of the weights later; None: it computes them itself."""
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
