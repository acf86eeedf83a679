"""Call: what one call of a module needs beside its tensors, from forward through recomputation to backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand, RngKey
from hqsweep.gemm import mm_t
from hqsweep.native import mm_t_native
from hqsweep.nn.context import Context
from hqsweep.ops.request import Output
from hqsweep.quant import HybridOperand, HybridQuantizer, Operand, QuantizerRole
from hqsweep.quant.sections import Section


@dataclass(frozen=True, kw_only=True)
class Call:
    """Captured in forward, so that backward quantizes under the same recipe and draws the same random bits."""

    module_type: str
    name: str
    quantizers: Section
    dtype: torch.dtype
    context: Context
    gemm: str
    """The recipe's mode: native multiplies codes on tensor cores, all others exact operands."""

    def key(self, tensor: str) -> RngKey:
        """The stream of one slot in this step and microbatch; of a weight in this step."""
        slot = str(QuantizerRole(self.module_type, tensor, self.name))
        part = self.context.microbatch if tensor != "weight" else 0
        return self.context.key(f"{slot}@{part}" if part else slot)

    def quantizer(self, tensor: str) -> HybridQuantizer:
        return getattr(self.quantizers, tensor)

    @property
    def product_takes(self) -> Output:
        """What quantize is asked for where product is next."""
        return "codes" if self.gemm == "native" else "exact"

    def quantize(
        self, tensor: str, x: Tensor, *, rowwise: Output | None = None, columnwise: Output | None = None
    ) -> HybridOperand:
        """x [rows, cols] by the quantizer of its slot."""
        return self.quantizer(tensor).quantize(x, rowwise=rowwise, columnwise=columnwise, key=self.key(tensor))

    def product(self, a: Operand | ExactOperand, b: Operand | ExactOperand, out_dtype: torch.dtype) -> Tensor:
        """a [m, k], b [n, k] -> [m, n]. UserError, with the module's name, for what gemm=native has no product for."""
        if self.gemm != "native":
            return mm_t(a, b, out_dtype=out_dtype)
        try:
            return mm_t_native(a, b, out_dtype=out_dtype)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def probe_tensor(self, tensor: str, x: Tensor) -> None:
        """Report x [rows, cols] to the probe, if there is one."""
        if self.context.probe:
            self.context.probe.tensor(self.name, tensor, x, self.quantizer(tensor), self.key(tensor))

    def probe_gemm(self, gemm: str, a: Tensor, b: Tensor, actual: Tensor) -> None:
        """Report a GEMM of unquantized a [m, k] and b [n, k], if there is a probe."""
        if self.context.probe:
            self.context.probe.gemm(self.name, gemm, a, b, actual)
