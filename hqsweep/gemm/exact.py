"""One product for all three GEMMs: mm_t(a, b)[i, j] = sum_k a[i, k] * b[j, k].

fprop mm_t(x.row, w.row), dgrad mm_t(dy.row, w.col), wgrad mm_t(dy.col, x.col). gemm=exact multiplies exact operand
matrices with float32 accumulation: in float32 on the CPU, and on CUDA in bfloat16 tensor cores if both matrices are
bfloat16. Per-tensor and per-row factors go to the float32 epilogue, as in hardware.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import matmul

from hqsweep.formats import ExactOperand
from hqsweep.gemm.product import add_product, fastest_product, product, product_into, scale_product
from hqsweep.gemm.product import takes as product_takes
from hqsweep.ops.library import direct, has_kernels
from hqsweep.ops.quantize.kernels import DTYPES, in_dtype
from hqsweep.quant.operand import Operand


def mm_t(
    a: Operand | ExactOperand, b: Operand | ExactOperand, *, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return a [m, k] times b [n, k] transposed, [m, n]: float32 product, float32 epilogue, one rounding to out_dtype.

    Exact operands may be e matrices with one factor per whole tensor: [e, m, k] and [e, n, k] -> [e, m, n].
    out: contiguous [m, n] of out_dtype, which receives the product and is returned; not in a trace.

    A GEMM without factors rounds to out_dtype when it stores. So does a CUDA GEMM with per-tensor factors
    (gemm.product). With per-row factors, a second pass over the float32 output multiplies and rounds.
    """
    a = a.operand() if isinstance(a, Operand) else a
    b = b.operand() if isinstance(b, Operand) else b
    if a.factor is None and b.factor is None and a.divisor == b.divisor == 1.0:
        return matrix_product(a.matrix, b.matrix, out_dtype, out)
    if _in_one_product(a, b, out_dtype):
        constant = 1.0 / (a.divisor * b.divisor)
        if out is not None and product_into(out, a.matrix, b.matrix, a.factor, b.factor, constant):
            return out
        return _into(out, product(a.matrix, b.matrix, a.factor, b.factor, constant, out_dtype))
    unscaled = matrix_product(a.matrix, b.matrix, torch.float32)
    if unscaled.dim() == 3:
        return epilogue(unscaled.flatten(0, 1), a, b, out_dtype).view(unscaled.shape)
    return _into(out, epilogue(unscaled, a, b, out_dtype))


def _into(out: Tensor | None, y: Tensor) -> Tensor:
    return y if out is None else out.copy_(y)


def add_mm_t(out: Tensor, a: Operand | ExactOperand, b: Operand | ExactOperand) -> None:
    """Add mm_t(a, b) to out in place, in float32. out: float32 of the product's shape.

    On CUDA the GEMM adds when it stores (gemm.product), without a separate product in memory. alpha * sum + out may
    then be rounded once instead of twice.
    """
    a = a.operand() if isinstance(a, Operand) else a
    b = b.operand() if isinstance(b, Operand) else b
    if out.is_contiguous() and _in_one_product(a, b, torch.float32):
        add_product(out, a.matrix, b.matrix, a.factor, b.factor, 1.0 / (a.divisor * b.divisor))
    else:
        out.add_(mm_t(a, b, out_dtype=torch.float32))


def _in_one_product(a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype) -> bool:
    """Return whether cuBLASLt takes the matrices, and one factor for the whole product."""
    factors = [operand.factor for operand in (a, b) if operand.factor is not None]
    return all(factor.numel() == 1 for factor in factors) and product_takes(a.matrix, b.matrix, out_dtype)


def matrix_product(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return mm_t() of plain matrices: [m, k], [n, k] -> [m, n], or of e pairs [e, m, k], [e, n, k] -> [e, m, n]."""
    return plain_product(a, b.mT, out_dtype, out)


def plain_product(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return matrix_product() for second matrices that are already transposed: [k, n] or [e, k, n]. out: as in
    mm_t()."""
    if not (a.is_cuda and a.dtype == b.dtype == torch.bfloat16):
        return _into(out, (_mm_float32 if direct(a) else torch.ops.hqsweep.mm_float32.default)(a, b, out_dtype))
    if out_dtype == torch.bfloat16 and out is not None:
        return _mm_rounded(a, b, out=out)
    if out_dtype == torch.bfloat16:
        return (_mm_rounded if direct(a) else torch.ops.hqsweep.mm_rounded.default)(a, b)
    if out is None and out_dtype == torch.float32 and direct(a):
        y = fastest_product(a, b.mT, torch.float32, _summed)
        if y is not None:
            return y
    return _into(out, in_dtype(_summed(a, b.mT), out_dtype))


def _summed(a: Tensor, b: Tensor) -> Tensor:
    return _multiply(a, b.mT, out_dtype=torch.float32)


def _multiply(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, **options)


_LIBRARY = torch.library.Library("hqsweep", "FRAGMENT")
# The float32 product, rounded to dtype. It is an operator because TorchInductor drops roundings inside fused code; an
# operator reads and writes rounded values in memory.
_LIBRARY.define("mm_float32(Tensor a, Tensor b, ScalarType dtype) -> Tensor")


@torch.library.impl(_LIBRARY, "mm_float32", "CompositeExplicitAutograd")
def _mm_float32(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return in_dtype(_multiply(a.float(), b.float()), dtype)


@torch.library.register_fake("hqsweep::mm_float32")
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


# plain_product of bfloat16 operands with one rounding to bfloat16. It is an operator because its setting is global to
# torch, and torch.compile must not look inside.
_LIBRARY.define("mm_rounded(Tensor a, Tensor b) -> Tensor")


@torch.library.impl(_LIBRARY, "mm_rounded", "CUDA")
def _mm_rounded(a: Tensor, b: Tensor, **options: Tensor) -> Tensor:
    """Return the product with one rounding, written to the option `out` if given."""
    y = fastest_product(a, b.mT, torch.bfloat16, _rounded, **options)
    return _rounded(a, b.mT, **options) if y is None else y


def _rounded(a: Tensor, b: Tensor, **options: Tensor) -> Tensor:
    """Return the product with cuBLAS's split-k off: adding parts in bfloat16 would round several times."""
    b = b.mT
    allowed = matmul.allow_bf16_reduced_precision_reduction
    if not allowed:
        return _multiply(a, b, **options)
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        return _multiply(a, b, **options)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True


@torch.library.register_fake("hqsweep::mm_rounded")
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def epilogue(product: Tensor, a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype) -> Tensor:
    """Return apply_factors() for two operands. A factor with several entries is per row. The product is overwritten."""
    factors = [] if a.factor is None else [(a.factor, a.factor.numel() > 1)]
    if b.factor is not None:
        factors.append((b.factor.t(), b.factor.numel() > 1))
    return apply_factors(product, factors, a.divisor * b.divisor, out_dtype)


def apply_factors(
    product: Tensor, factors: Sequence[tuple[Tensor, bool]], divisor: float, out_dtype: torch.dtype
) -> Tensor:
    """Return product [m, n] times up to two factors over the divisor, rounded to out_dtype.

    factors: (factor [1, 1], [m, 1] or [1, n], whether it differs by row or column). For scalars alpha = fl(fl(f_a *
    f_b) * fl(1 / divisor)); per-row factors come after the constant part. With one per-row side, its factor is first
    multiplied by the other's scalar; with two, rows come before columns (TransformerEngine
    pytorch/cpp_extensions/gemm.py:84 at d0067d0da6cb).
    """
    tensors, per_row = [factor for factor, _ in factors], [rows for _, rows in factors]
    inverse = 1.0 / divisor  # torch rounds it to float32 first
    if not factors and inverse == 1.0:
        return in_dtype(product, out_dtype)
    if not any(per_row):
        return scaled(product, reduce(torch.mul, [*tensors, inverse]), out_dtype, before=1.0)
    if all(per_row) and len(tensors) == 2:
        product, inverse = scaled(product, tensors.pop(0), torch.float32, before=inverse), 1.0
    return scaled(product, reduce(torch.mul, tensors), out_dtype, before=inverse)


def scaled(product: Tensor, factor: Tensor | float, out_dtype: torch.dtype, *, before: float) -> Tensor:
    """Return fl(fl(product * before) * factor) in float32, rounded to out_dtype.

    product: [m, n]. factor: a number, or [1, 1], [m, 1] or [1, n]. On a GPU it is one pass, and product may be
    bfloat16.
    Otherwise a float32 product is overwritten.
    """
    if product.is_cuda and isinstance(factor, Tensor) and has_kernels("cuda") and out_dtype in DTYPES:
        return scale_product(product, factor, out_dtype, before)
    product = product.float()
    if (
        torch.compiler.is_compiling()
    ):  # which makes its own copies; torch 2.11 rounds an `out` of another dtype otherwise
        return in_dtype((product * before if before != 1.0 else product) * factor, out_dtype)
    product = product.mul_(before) if before != 1.0 else product
    if product.dtype == out_dtype:
        return product.mul_(factor)
    return torch.mul(product, factor, out=torch.empty_like(product, dtype=out_dtype))
