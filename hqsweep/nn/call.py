"""Call: what one call of a module needs beside its tensors, from forward through recomputation to backward."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand, RngKey
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.native import mm_t_native
from hqsweep.memo import constant_result
from hqsweep.nn.context import Context
from hqsweep.nn.delayed import DelayedStates
from hqsweep.nn.weight import rounded
from hqsweep.ops.request import Output
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import Section

_NAMES: dict[tuple, str] = {}
_KEPT_NAMES = 8192


@constant_result
def _kept_slot_name(*facts) -> str:
    """slot_name, made once."""
    found = _NAMES.get(facts)
    if found is None:
        if len(_NAMES) >= _KEPT_NAMES:
            _NAMES.clear()
        found = _NAMES[facts] = slot_name(*facts)
    return found


def slot_name(module_type: str, tensor: str, name: str, expert: int | None, part: int) -> str:
    """The slot of the random bits of a tensor, in a part of the step's batch."""
    slot = str(QuantizerRole(module_type, tensor, name, expert))
    return f"{slot}@{part}" if part else slot


@dataclass(frozen=True, kw_only=True)
class Call:
    """Captured in forward, so that backward quantizes under the same recipe and draws the same random bits."""

    module_type: str
    name: str
    expert: int | None = None
    """Which of the experts of a grouped linear."""
    quantizers: Section
    dtype: torch.dtype
    context: Context
    gemm: str
    """The recipe's mode: native multiplies codes on tensor cores, all others exact operands."""
    states: DelayedStates
    grad: bool
    """Whether autograd records: without it nothing of a direction that only backward reads is made, and no state of
    delayed scaling changes."""

    def key(self, tensor: str) -> RngKey:
        """The stream of one slot in this step and microbatch; of a weight in this step."""
        return self.context.key(_kept_slot_name(self.module_type, tensor, self.name, self.expert, self.part(tensor)))

    def part(self, tensor: str) -> int:
        """Of the step's batch, for what differs among microbatches."""
        return self.context.microbatch if tensor != "weight" else 0

    @property
    def layer(self) -> str:
        """As messages and a probe name it: experts stand behind a point."""
        return self.name if self.expert is None else f"{self.name}.{self.expert}"

    def quantizer(self, tensor: str) -> HybridQuantizer:
        return getattr(self.quantizers, tensor)

    def states_of(self, tensor: str, x: Tensor) -> SlotStates | None:
        """The states of one slot, on x's device."""
        quantizer = self.quantizer(tensor)
        if quantizer is None or not quantizer.delayed:
            return None
        return self.states.of(tensor, quantizer, device=x.device, **self.recording)

    @property
    def recording(self) -> dict[str, Any]:
        """Under which step, whether and with which ranks the states of delayed scaling record this call."""
        return {"step": self.context.step, "record": self.grad, "group": self.context.amax_group}

    @property
    def product_takes(self) -> Output:
        """What quantize is asked for where product is next."""
        return "codes" if self.gemm == "native" else "exact"

    def quantize(
        self, tensor: str, x: Tensor, *, rowwise: Output | None = None, columnwise: Output | None = None
    ) -> HybridOperand:
        """x [rows, cols] by the quantizer of its slot."""
        key, states = self.key(tensor), self.states_of(tensor, x)
        return self.quantizer(tensor).quantize(x, rowwise=rowwise, columnwise=columnwise, key=key, states=states)

    def rounded(self, tensor: str, x: Tensor) -> Tensor:
        """x in the values of the quantizer of a boundary slot; x itself without one."""
        quantizer = self.quantizer(tensor)
        return x if quantizer is None else rounded(x, quantizer, self.key(tensor), self.states_of(tensor, x))

    def product(self, a: Operand | ExactOperand, b: Operand | ExactOperand, out_dtype: torch.dtype) -> Tensor:
        """a [m, k], b [n, k] -> [m, n]. UserError, with the module's name, for what gemm=native has no product for."""
        if self.gemm != "native":
            return mm_t(a, b, out_dtype=out_dtype)
        try:
            return mm_t_native(a, b, out_dtype=out_dtype)
        except UserError as error:
            raise UserError(f"{self.layer}: {error}") from None

    def probe_tensor(self, tensor: str, x: Tensor) -> None:
        """Report x [rows, cols] to the probe, if there is one."""
        if self.context.probe:
            facts = (self.quantizer(tensor), self.key(tensor), self.states_of(tensor, x))
            self.context.probe.tensor(self.layer, tensor, x, *facts)

    def probe_gemm(self, gemm: str, a: Tensor, b: Tensor, actual: Tensor) -> None:
        """Report a GEMM of unquantized a [m, k] and b [n, k], if there is a probe."""
        if self.context.probe:
            self.context.probe.gemm(self.layer, gemm, a, b, actual)
