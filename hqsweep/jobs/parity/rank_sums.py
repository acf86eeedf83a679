"""Bounds for sums that ranks split: how far they may be from one process, only because of the order of sums.

A float32 sum of n products is off by at most n * 2^-24 * |a_i| |b_j|, in any order (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1), and two such sums differ by at most twice that. Ranks send values in bfloat16, which
rounds them by at most 2^-8 of their size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.jobs.parity.compare_bytes import row
from hqsweep.jobs.parity.rank_cases import FIRST, Problem, in_order, one_process
from hqsweep.nn import quantization
from hqsweep.quant.hybrid import HybridQuantizer

NAME = "order of sums"
ROUNDING = 2.0**-24
"""The relative error bound of a float32 addition."""
TRAVEL = 2.0**-8 * (1 + 2.0**-6)
"""The error bound of rounding a value to bfloat16, relative to the rounded value."""


class SplitSum:
    """mm_t(a, b) by parts of the contracted axis, plus a bias.

    Each part is rounded to bfloat16, as it is sent, and the parts are added in float32 in order and rounded.
    """

    def __init__(self, a: ExactOperand, b: ExactOperand, ranks: int, bias: Tensor | None = None) -> None:
        self.operands, self.bias = (a, b), bias
        pairs = zip(a.matrix.chunk(ranks, 1), b.matrix.chunk(ranks, 1), strict=True)
        self.parts = [mm_t(replace(a, matrix=x), replace(b, matrix=w), out_dtype=torch.bfloat16) for x, w in pairs]
        total = in_order(self.parts).bfloat16()
        self.total = total if bias is None else total + bias


def order_of_sums(
    subject: str, problem: Problem, shared: Iterable[tuple[str, SplitSum, Tensor]]
) -> Iterator[dict[str, object]]:
    """Rows of the sums that ranks split: gradients of a weight by slices of the rows, and sums of linears that ranks
    share.

    Gradients are left out where the slices' operands differ from the whole's, as with scales of a whole tensor. The
    sums are given as (case, sum, whole product).
    """
    slices = _by_slices(problem)
    if slices is not None:
        yield _row(subject, f"{problem.ranks} ranks, wgrad of slices", *slices)
    for case, split, whole in shared:
        error = (split.total.double() - whole.double()).abs()
        yield _row(subject, f"{problem.ranks} ranks, {case}", error, _allowed(split, whole))


def _row(subject: str, case: str, error: Tensor, allowed: Tensor) -> dict[str, object]:
    missed = int((~(error <= allowed)).sum())
    largest = (error / allowed).nan_to_num(0.0).max()
    note = f"largest difference from one process: {largest:.1e} of what the order of sums allows"
    counted = {"status": "FAIL" if missed else "PASS", "total": error.numel(), "mismatches": missed, "note": note}
    return row(NAME, subject, case, {}) | counted


def _allowed(split: SplitSum, whole: Tensor) -> Tensor:
    """float64, of whole's shape: the allowed error. It covers the sums, and the roundings of each part and of both
    sums, and of both again where a bias is added."""
    a, b = (_magnitudes(operand) for operand in split.operands)
    sums = 2 * split.operands[0].matrix.shape[1] * ROUNDING * a[:, None] * b[None, :]
    rounded = sum(part.double().abs() for part in split.parts) + 2 * (split.total.double().abs() + whole.double().abs())
    return sums + TRAVEL * (rounded if split.bias is None else rounded + 2 * split.bias.double().abs())


def _magnitudes(operand: ExactOperand) -> Tensor:
    """float64 [rows]: the 2-norms of the rows that a product reads."""
    norms = operand.matrix.double().norm(dim=1) / operand.divisor
    return norms if operand.factor is None else norms * operand.factor.double().view(-1)


def _by_slices(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """(errors, allowed errors) of the weight's gradient; None where the slices' operands differ from the whole's."""
    step = FIRST
    split = one_process(problem)[0][f"weight.grad of step {step}"] * problem.ranks
    parts = [problem.slice(step, rank) for rank in range(problem.ranks)]
    x, dy = (torch.cat(column) for column in zip(*parts, strict=True))
    quantizers = problem.quantizers
    tensors = ((quantizers.input, x, 0), (quantizers.grad_output, dy, 1))
    if any(q.stochastic or q.delayed or not _same_by_slices(q, t, [p[i] for p in parts]) for q, t, i in tensors):
        return None
    module = problem.linear()
    with quantization(seed=problem.seed, step=step):
        module(x).backward(dy)
    of_x, of_dy = (_values(q, t).double().norm(dim=1) for q, t, _ in tensors)
    return (split - module.weight.grad).abs(), 2 * len(x) * ROUNDING * of_dy[:, None] * of_x[None, :]


def _same_by_slices(quantizer: HybridQuantizer, x: Tensor, slices: list[Tensor]) -> bool:
    """Whether the columnwise operand of x consists of the operands of its slices. A scale of all rows prevents it."""
    if quantizer.quantize(x, rowwise=None, columnwise="exact").columnwise.factor is not None:
        return False
    return torch.equal(_values(quantizer, x), torch.cat([_values(quantizer, part) for part in slices], dim=1))


def _values(quantizer: HybridQuantizer, x: Tensor) -> Tensor:
    """float32 [cols, rows]: the values of the columnwise operand that a product reads."""
    return quantizer.quantize(x, rowwise=None, columnwise="exact").columnwise.matrix.float()
