"""Call: the facts of one call of a module, beside its tensors, from forward through recomputation to backward.

LinearCall is a call of a linear with one weight matrix, or with one for each expert.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, RngKeys, RngNumbers
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.grouped import mm_t_tokens, mm_t_weights
from hqsweep.gemm.native import GemmPlan, multiply
from hqsweep.memo import cached_property, memo
from hqsweep.nn.core.context import Context, SlotNumbers
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    WeightWorkspace,
    check_held,
    check_main_grad,
    expert_weights,
    held_operands,
    is_gathered,
    is_held,
    link_states,
    rounded_by,
    weight_matrix,
)
from hqsweep.nn.core.probe import Site
from hqsweep.nn.core.wire import Part
from hqsweep.ops.quantize.fused import Normed
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.ops.splits import Splits
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.group import quantize_group
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Skeleton, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers, Section


@memo
def slot_name(module_type: str, tensor: str, name: str, expert: int | None, part: int) -> str:
    """Return the slot of a tensor's random bits, in a part of the step's batch."""
    slot = str(QuantizerRole(module_type, tensor, name, expert))
    return f"{slot}@{part}" if part else slot


@memo
def slot_names(module_type: str, tensor: str, name: str, experts: range, part: int) -> tuple[str, ...]:
    """Return the slot_name of each of these experts."""
    return tuple(slot_name(module_type, tensor, name, expert, part) for expert in experts)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The facts that a call captures in forward.

    With them backward quantizes under the same recipe, and draws the same random bits.
    """

    module_type: str
    name: str
    expert: int | None = None
    """The number of the expert of a grouped linear."""
    first_expert: int = 0
    """The first expert that this rank holds. Numbers count over all ranks."""
    quantizers: Section
    dtype: torch.dtype
    context: Context
    gemm: str
    """The recipe's mode: native multiplies codes on tensor cores, all others exact operands."""
    states: DelayedStates | ExpertStates
    """The states of the module, or of each of its experts."""
    epoch: int | None = None
    """The epoch of the states in forward."""
    grad: bool
    """Whether autograd records. Without it, no operand is made that only backward reads, and no state of delayed
    scaling changes."""
    splits: Splits | None = None
    """The rows of each expert in every tensor except the weight; None: a tensor is one matrix."""
    weight_splits: Splits | None = None
    """The rows of each expert in all weights, one below the other."""
    slot_numbers: SlotNumbers | None = None
    """Numbers that replace the module's name in the keys of random bits, in a trace that does not depend on the
    name."""

    def key(self, tensor: str) -> RngKey | RngKeys | RngNumbers:
        """Return the key of one slot in this step and microbatch, or a key for each expert.

        A weight's key has the step alone.
        """
        # Microbatches are parts of the step's batch, in which weights do not differ.
        part = self.context.microbatch if tensor != "weight" else 0
        if self.slot_numbers is not None:
            return self.context.numbered_key(self.slot_numbers[tensor][part])
        if self.splits is None:
            return self.context.key(slot_name(self.module_type, tensor, self.name, self.expert, part))
        experts = range(self.first_expert, self.first_expert + self.splits.count)
        slots = slot_names(self.module_type, tensor, self.name, experts, part)
        one = self.context.key("")
        return RngKeys(seed=one.seed, slots=slots, step=one.step, counter=one.counter)

    @property
    def layer(self) -> str:
        """The name of the layer in messages and for a probe: "NAME", or "NAME.EXPERT" for an expert."""
        return self.name if self.expert is None else f"{self.name}.{self.expert}"

    def quantizer(self, tensor: str) -> HybridQuantizer:
        return getattr(self.quantizers, tensor)

    def states_of(self, tensor: str, x: Tensor) -> SlotStates | list[SlotStates] | None:
        """Return the states of one slot, or a list with the states of each expert, on x's device."""
        quantizer = self.quantizer(tensor)
        if quantizer is None or not quantizer.delayed:
            return None
        return self.states.of(tensor, quantizer, device=x.device, epoch=self.epoch, **self.recording)

    @property
    def recording(self) -> dict[str, Any]:
        """The arguments with which states of delayed scaling record this call: the step, whether to record, and the
        group."""
        context = self.context
        step = context.turn if context.step is None else context.step
        return {"step": step, "record": self.grad, "group": context.amax_group}

    @property
    def product_takes(self) -> Output:
        """The output that quantize() is asked for where a product reads it."""
        return "codes" if self.gemm == "native" or self.context.reader is not None else "exact"

    @for_its_slot
    def quantize(
        self,
        tensor: str,
        x: Tensor,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        by_rows: bool = False,
        amaxes: Sequence[Tensor] = (),
    ) -> HybridOperand:
        """Quantize x [rows, cols] for its slot, as one matrix or each expert's rows by themselves.

        by_rows: make exact columns of experts as torch._grouped_mm takes them. amaxes: known amaxes of x, for one
        matrix. A UserError names the tensor and the expert.
        """
        quantizer = getattr(self.quantizers, tensor)
        key = self.key(tensor) if quantizer.reads_key else None
        states = self.states_of(tensor, x) if quantizer.delayed else None
        if self.splits is None:
            known = {"amaxes": amaxes} if amaxes else {}
            try:
                return quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise, key=key, states=states, **known)
            except UserError as error:
                raise UserError(f"{self.layer}: {tensor}: {error}") from None
        splits = self.weight_splits if tensor == "weight" else self.splits
        options = {"keys": key, "states": states, "by_rows": by_rows}
        try:
            return quantize_group(x, splits, quantizer, rowwise=rowwise, columnwise=columnwise, **options)
        except UserError as error:
            raise UserError(f"{self.name}: {tensor} of {error}") from None

    @for_its_slot
    def quantize_under(
        self, tensor: str, x: Tensor, amax: Tensor, *, rowwise: Output | None = None, columnwise: Output | None = None
    ) -> HybridOperand:
        """Quantize one matrix under a known amax. Its quantizer must have takes_amax."""
        quantizer = self.quantizer(tensor)
        key = self.key(tensor) if quantizer.reads_key else None
        states = self.states_of(tensor, x) if quantizer.delayed else None
        return quantizer.quantize_under(x, amax, rowwise=rowwise, columnwise=columnwise, key=key, states=states)

    @for_its_slot
    def quantize_activated(
        self,
        tensor: str,
        z: Tensor,
        dh: Tensor | None,
        kind: str,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
    ) -> HybridOperand:
        """Quantize activation(z) [rows, cols], or with dh the gradient of z. One matrix, on CUDA."""
        quantizer = self.quantizer(tensor)
        options = {"key": self.key(tensor) if quantizer.reads_key else None, "states": self.states_of(tensor, z)}
        return quantizer.quantize_activated(z, dh, kind, rowwise=rowwise, columnwise=columnwise, **options)

    def rounded(self, tensor: str, x: Tensor) -> Tensor:
        """Return x rounded to the values of a boundary slot's quantizer, each expert's rows by themselves.

        Without a quantizer it returns x itself. It waits for splits that only a device knows.
        """
        quantizer = self.quantizer(tensor)
        if quantizer is None:
            return x
        return rounded_by(x, quantizer, lambda rows: self.quantize(tensor, rows, rowwise="codes").rowwise)

    def probe_tensor(self, tensor: str, x: Tensor) -> None:
        """Report x [rows, cols] to the probe, if there is one."""
        if self.context.probe:
            slot = (self.quantizer(tensor), self.key(tensor), self.states_of(tensor, x))
            self.context.probe.tensor(self.site(tensor, self.part_of(tensor, x)), x, *slot)

    def site(self, name: str, part: Part | None) -> Site:
        """Return the site of a tensor or a GEMM of this call, for a probe."""
        return Site(layer=self.layer, name=name, microbatch=self.context.microbatch, part=part)

    def part_of(self, tensor: str, x: Tensor) -> Part | None:
        """Return the place of x in a matrix that ranks share; None: x is the whole matrix."""
        return None


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
