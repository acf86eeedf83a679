"""Call: the facts of one call of a module, beside its tensors, from forward through recomputation to backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, RngKeys, RngNumbers
from hqsweep.memo import memo
from hqsweep.nn.core.context import Context, SlotNumbers
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.probe import Site
from hqsweep.nn.core.rounding import rounded_by
from hqsweep.nn.core.wire import Part
from hqsweep.ops.members.splits import Splits
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.group import quantize_group
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import HybridOperand
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import Section


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
