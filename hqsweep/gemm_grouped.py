"""The three GEMMs of a grouped linear, over all experts e with the rows x_e [m_e, K] and the weights w_e [N, K].

    fprop  y_e  = x_e @ w_e.T    mm_t(x_e.row, w_e.row)      [m_e, N]    ragged rows
    dgrad  dx_e = dy_e @ w_e     mm_t(dy_e.row, w_e.col)     [m_e, K]    ragged rows
    wgrad  dw_e = dy_e.T @ x_e   mm_t(dy_e.col, x_e.col)     [N, K]      ragged contracted axis

Three plans give them. `loop` is mm_t for each expert, and is the reference: its bytes are those of single linears.
`torch._grouped_mm` is one kernel on exact bfloat16 operands, which accumulates in float32 and can store bfloat16 only:
its result is rounded once more where factors follow, and where float32 is wanted. So wgrad into float32 is a loop for
as long as the host knows the splits, and what needs a float32 operand is one always. Operands of a ragged contracted
axis are given with that axis outermost, so that no split has to be aligned. `torch._scaled_grouped_mm` is the kernel of
gemm=native for rows of E4M3 codes with a scale for each expert's tensor, on sm_90; all else that is native is a loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, Format, Fp8PerTensor
from hqsweep.gemm import apply_factors, mm_t, plan
from hqsweep.native import capability_of, gemm_plan, mm_t_native
from hqsweep.ops.grouped import pack
from hqsweep.ops.grouped_layout import GroupedExact, GroupLayout, Splits
from hqsweep.ops.plan import plan_of
from hqsweep.quant.grouped_operand import GroupedOperand
from hqsweep.quant.operand import Operand

GROUPED_MAJORS = (9, 10)
"""Compute capabilities for which torch._grouped_mm has a kernel; elsewhere it is a loop that waits for the splits."""
NATIVE_MAJORS = (9,)
"""Those for which torch._scaled_grouped_mm takes E4M3 codes with scales of rows."""
ALIGNMENT = 8
"""Both take strides of multiples of 16 bytes: so many bfloat16 elements, and twice as many codes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """Operands of experts that lie each in memory of its own."""

    members: Sequence[Operand | ExactOperand]


Group = GroupedOperand | GroupedExact | Members


@dataclass(frozen=True, kw_only=True)
class GroupedPlan:
    """How a GEMM over experts is computed."""

    a: Format
    b: Format
    device: torch.device
    gemm_mode: str
    grouped: bool
    """By one kernel, torch._scaled_grouped_mm for gemm=native and else torch._grouped_mm; otherwise a loop."""

    def __str__(self) -> str:
        if self.grouped and self.gemm_mode == "native":
            return "native: tensor cores of sm_90 through torch._scaled_grouped_mm, scales of experts as those of rows"
        if not self.grouped:
            return f"{gemm_plan(self.gemm_mode, self.a, self.b, self.device)}, for each expert"
        factors = any(plan_of(format).amax_name for format in (self.a, self.b))
        text = "exact: bf16 operands, torch._grouped_mm, float32 accumulation, stored in bfloat16"
        return f"{text} before the factors of experts" if factors else text


def grouped_plan(
    a: Format,
    b: Format,
    device: torch.device | str,
    *,
    gemm_mode: str = "exact",
    out_dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int] = (2 * ALIGNMENT, 2 * ALIGNMENT),
    host_splits: bool = True,
    gemm: str = "fprop",
) -> GroupedPlan:
    """The plan for operands of these formats; out_dtype: of the products, float32 for wgrad into FP32 weights.

    sizes: in and out features; host_splits: whether the host knows the splits; gemm: "fprop", "dgrad" or "wgrad".
    """
    device = torch.device(device)
    facts = {"a": a, "b": b, "device": device, "gemm_mode": gemm_mode}
    if gemm_mode == "native":
        codes = gemm != "wgrad" and out_dtype == torch.bfloat16 and all(map(_is_e4m3_tensor, (a, b)))
        fits = all(size % (2 * ALIGNMENT) == 0 for size in sizes)
        return GroupedPlan(**facts, grouped=codes and fits and has_kernel(device, NATIVE_MAJORS))
    fits = all(size % ALIGNMENT == 0 for size in sizes) and plan(a, b, device.type).operands == "bf16"
    wide = out_dtype == torch.float32 and host_splits
    return GroupedPlan(**facts, grouped=fits and not wide and has_kernel(device, GROUPED_MAJORS))


def _is_e4m3_tensor(format: Format) -> bool:
    return isinstance(format, Fp8PerTensor) and format.element_name == "e4m3"


def has_kernel(device: torch.device, majors: Sequence[int]) -> bool:
    """Whether a GPU is of one of these compute capabilities."""
    capability = capability_of(device)
    return capability is not None and capability[0] in majors


def mm_t_tokens(a: Group, b: Group, how: GroupedPlan, *, out_dtype: torch.dtype) -> Tensor:
    """fprop and dgrad: a with members [m_e, k], b with members [n, k] -> [sum of m_e, n] in out_dtype."""
    if how.grouped and how.gemm_mode == "native":
        return tokens_by_native_kernel(a, _packed(b))
    if how.grouped:
        return tokens_by_kernel(_exact(a), _exact(b), out_dtype)
    parts = [_single(x, w, how, out_dtype) for x, w in zip(a.members, b.members, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def mm_t_weights(a: Group, b: Group, how: GroupedPlan, *, out_dtype: torch.dtype) -> Sequence[Tensor]:
    """wgrad: a with members [n, m_e], b with members [k, m_e] -> for each expert [n, k] in out_dtype.

    By torch._grouped_mm they are the parts of one tensor.
    """
    if how.grouped:
        return weights_by_kernel(_exact(a), _exact(b), out_dtype)
    return [_single(dy, x, how, out_dtype) for dy, x in zip(a.members, b.members, strict=True)]


def _single(a: Operand | ExactOperand, b: Operand | ExactOperand, how: GroupedPlan, out_dtype: torch.dtype) -> Tensor:
    """The product of one expert; without tokens there is none to ask the tensor cores for."""
    if how.gemm_mode != "native":
        return mm_t(a, b, out_dtype=out_dtype)
    (m, k), (n, _) = a.shape, b.shape
    if m * n * k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=next(iter(a.buffers.values())).device)
    return mm_t_native(a, b, out_dtype=out_dtype)


def tokens_by_kernel(a: GroupedExact, b: GroupedExact, out_dtype: torch.dtype) -> Tensor:
    """mm_t_tokens by torch._grouped_mm, of bfloat16 matrices (on a CPU of float32 ones, too)."""
    splits, experts, (n, k) = a.layout.splits, b.layout.splits.count, b.layout.first_shape
    w = b.matrix.view(experts, k, n) if b.by_rows else b.matrix.view(experts, n, k).transpose(1, 2)
    y = torch._grouped_mm(a.matrix.view(splits.rows, k), w, offs=splits.ends(w.device))

    def of_rows(factor: Tensor) -> Tensor:
        sizes = splits.on(factor.device)
        return factor.view(experts, -1).repeat_interleave(sizes, dim=0, output_size=splits.rows)

    left = [] if a.factor is None else [(a.factor.view(-1, 1) if a.per_row else of_rows(a.factor), a.per_row)]
    right = [] if b.factor is None else [(of_rows(b.factor), b.per_row)]
    return apply_factors(y, left + right, a.divisor * b.divisor, out_dtype)


def tokens_by_native_kernel(a: GroupedOperand, b: GroupedOperand) -> Tensor:
    """mm_t_tokens of E4M3 codes by torch._scaled_grouped_mm, without fast accumulation, in bfloat16."""
    splits, experts, (n, k) = a.layout.splits, b.layout.splits.count, b.layout.first_shape
    left, right = (group.buffers["q"].view(torch.float8_e4m3fn) for group in (a, b))
    sizes = splits.on(left.device)
    rows = a.buffers["s"].repeat_interleave(sizes, output_size=splits.rows)
    columns = b.buffers["s"].view(experts, 1).expand(experts, n).contiguous()
    return torch._scaled_grouped_mm(
        left.view(splits.rows, k), right.view(experts, n, k).transpose(1, 2), rows, columns,
        offs=splits.ends(left.device), out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip


def weights_by_kernel(a: GroupedExact, b: GroupedExact, out_dtype: torch.dtype) -> Tensor:
    """mm_t_weights by torch._grouped_mm: [experts, n, k]."""
    dw = torch._grouped_mm(a.rows().t(), b.rows(), offs=a.layout.splits.ends(a.matrix.device))
    factors = [(group.factor.view(-1, 1), False) for group in (a, b) if group.factor is not None]
    return apply_factors(dw.flatten(1), factors, a.divisor * b.divisor, out_dtype).view_as(dw)


def _exact(group: Group) -> GroupedExact:
    """Exact matrices in one memory: decoded, and put together, where they are not there already."""
    if isinstance(group, GroupedExact):
        return group
    if isinstance(group, GroupedOperand):
        return group.operand()
    return pack([member.operand() for member in group.members], group.members[0].format, _layout(group))


def _packed(group: GroupedOperand | Members) -> GroupedOperand:
    """Codes in one memory."""
    if isinstance(group, GroupedOperand):
        return group
    first, layout = group.members[0], _layout(group)
    buffers = pack([member.buffers for member in group.members], first.format, layout)
    return GroupedOperand(format=first.format, layout=layout, dtype=first.dtype, buffers=buffers)


def _layout(group: Members) -> GroupLayout:
    """Of equal members, as they are."""
    rows, width = group.members[0].shape
    return GroupLayout(splits=Splits.uniform(len(group.members), rows), width=width, columnwise=False)
