"""One product for all three GEMMs: mm_t(a, b)[i, j] = sum_k a[i, k] * b[j, k].

fprop mm_t(x.row, w.row), dgrad mm_t(dy.row, w.col), wgrad mm_t(dy.col, x.col). gemm=exact multiplies the exact operand
matrices with float32 accumulation: in float32 on CPU; on CUDA in bfloat16 tensor cores with float32 output where both
matrices are bfloat16. The per-tensor and per-row factors go to the float32 epilogue, as hardware applies them.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, Format, Fp8Block, Identity
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a pair of formats is multiplied on a device: which dtype the matrices have, and who accumulates."""

    operands: str
    compute: str

    def __str__(self) -> str:
        return f"exact: {self.operands} operands, {self.compute}"


def plan(a: Format, b: Format, device_type: str) -> Plan:
    """The plan that mm_t follows for operands of these formats."""
    operands = "bf16" if all(map(_fits_bf16, (a, b))) else "fp32"
    if device_type == "cpu":
        return Plan(operands=operands, compute="float32 GEMM")
    if operands == "fp32":
        return Plan(operands=operands, compute="float32 GEMM (TF32 off)")
    return Plan(operands=operands, compute="bfloat16 tensor cores, float32 accumulation and output")


def mm_t(a: Operand | ExactOperand, b: Operand | ExactOperand, *, out_dtype: torch.dtype) -> Tensor:
    """a [m, k], b [n, k] -> [m, n]: float32 product, float32 epilogue, then one rounding to out_dtype."""
    a, b = (o.operand() if isinstance(o, Operand) else o for o in (a, b))
    return _epilogue(_product(a.matrix, b.matrix), a, b).to(out_dtype)


def _fits_bf16(format: Format) -> bool:
    if isinstance(format, Identity):
        return format.name == "bf16"
    return not isinstance(format, Fp8Block) or format.pow2


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return torch.mm(a.float(), b.float().t())


def _epilogue(product: Tensor, a: ExactOperand, b: ExactOperand) -> Tensor:
    """alpha = fl(fl(f_a * f_b) * fl(1 / (d_a * d_b))) for scalars; per-row factors after the constant part.

    With one per-row side its factor times the other's scalar is formed first; with two, rows then columns
    (TransformerEngine pytorch/cpp_extensions/gemm.py:84 at d0067d0da6cb).
    """
    rows, columns = a.factor, None if b.factor is None else b.factor.t()
    factors = [f for f in (rows, columns) if f is not None]
    divisor = a.divisor * b.divisor
    inverse = torch.full((1, 1), 1.0 / divisor, device=product.device)
    if all(f.numel() == 1 for f in factors):
        alpha = [*factors, inverse] if divisor != 1.0 else factors
        return product * reduce(torch.mul, alpha) if alpha else product
    product = product * inverse if divisor != 1.0 else product
    if all(f.numel() > 1 for f in factors):
        return reduce(torch.mul, factors, product)
    return product * reduce(torch.mul, factors)
