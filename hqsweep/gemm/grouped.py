"""The three GEMMs of a grouped linear, over all experts e with rows x_e [m_e, K] and weights w_e [N, K].

    fprop  y_e  = x_e @ w_e.T    mm_t(x_e.row, w_e.row)      [m_e, N]    ragged rows
    dgrad  dx_e = dy_e @ w_e     mm_t(dy_e.row, w_e.col)     [m_e, K]    ragged rows
    wgrad  dw_e = dy_e.T @ x_e   mm_t(dy_e.col, x_e.col)     [N, K]      ragged contracted axis

There are four plans:
`loop` runs mm_t for each expert. It is the reference, with the bytes of single linears.
`torch.bmm` is one kernel on exact bfloat16 operands, if the host knows that all experts have equally many tokens. It
accumulates in float32 and stores float32, or bfloat16 before factors are applied. It runs on any GPU.
`torch._grouped_mm` is one kernel for any splits. It stores only bfloat16, so a result with factors, or in float32, is
rounded once more. Hence wgrad into float32 is a loop while the host knows the splits, and float32 operands always take
a loop. Operands with a ragged contracted axis are passed with that axis outermost, so that splits need no alignment.
`torch._scaled_grouped_mm` is gemm=native's kernel on sm_90, for rows of E4M3 codes with one scale per row, or per
expert's tensor. All other native products are loops.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hqsweep.gemm.exact import apply_factors, plain_product
from hqsweep.gemm.native import GemmPlan, multiply
from hqsweep.ops.layout import GroupLayout, PackedExact, ShapesLayout, pack
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.splits import Splits
from hqsweep.quant.operand import Members, Operand
from hqsweep.torch_private import grouped_mm, scaled_grouped_mm, unsafe_view

Group = Operand | PackedExact | Members


def mm_t_tokens(a: Group, b: Group, plan: GemmPlan, *, out_dtype: torch.dtype) -> Tensor:
    """Return fprop or dgrad, [rows of a's splits, n] in out_dtype. a: members [m_e, k]; b: members [n, k].

    UserError, naming the member, for groups whose members differ in width, and for a b whose members differ in shape.
    """
    if plan.kernel == "torch._scaled_grouped_mm":
        return tokens_by_native_kernel(a, _packed(b))
    if plan.one_kernel:
        return tokens_by_kernel(_exact(a), _exact(b), out_dtype, equal=plan.kernel == "torch.bmm")
    _check_members(a, b, one_shape=True)
    parts = [multiply(x, w, plan.mode, out_dtype) for x, w in zip(a.members, b.members, strict=True)]
    left_over = a.layout.splits.rows - sum(map(len, parts))
    if left_over:
        parts.append(parts[0].new_zeros(left_over, parts[0].shape[1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def mm_t_weights(a: Group, b: Group, plan: GemmPlan, *, out_dtype: torch.dtype) -> Sequence[Tensor]:
    """Return wgrad, [n, k] per expert, in out_dtype. a: members [n, m_e]; b: members [k, m_e].

    With one kernel, the results are parts of one tensor. UserError, naming the member, for members that differ in
    width.
    """
    if plan.one_kernel:
        return weights_by_kernel(_exact(a), _exact(b), out_dtype, equal=plan.kernel == "torch.bmm")
    _check_members(a, b, one_shape=False)
    return [multiply(dy, x, plan.mode, out_dtype) for dy, x in zip(a.members, b.members, strict=True)]


def _check_members(a: Group, b: Group, *, one_shape: bool) -> None:
    """Raise the errors of the loops; kernels raise them when they ask for splits and shapes."""
    for group in (a, b):
        if isinstance(group, Members):
            continue
        if isinstance(group.layout, ShapesLayout):
            group.layout.refuse_product()
        if one_shape and group is b:
            _ = group.layout.one_shape


def tokens_by_kernel(a: PackedExact, b: PackedExact, out_dtype: torch.dtype, *, equal: bool = False) -> Tensor:
    """Run mm_t_tokens() on bfloat16 matrices (on a CPU also float32) by torch._grouped_mm; for equal splits by
    torch.bmm."""
    splits, experts, per_row = a.layout.splits, b.layout.splits.count, a.per_row or b.per_row
    if equal:
        y = plain_product(a.stacked(), b.stacked_turned(), _stored(out_dtype))
        if not per_row:
            return _as_rows(_by_experts(y, a, b, out_dtype))
        y = _as_rows(y)
    else:
        y = grouped_mm(a.rows(), b.stacked_turned(), offs=splits.ends(b.matrix.device))

    def of_rows(factor: Tensor) -> Tensor:
        return splits.spread(factor.view(experts, -1))

    if not per_row and a.factor is not None and b.factor is not None:
        factors = [(of_rows(a.factor * b.factor), False)]  # rows are multiplied by the product of both
    else:
        left = [] if a.factor is None else [(a.factor.view(-1, 1) if a.per_row else of_rows(a.factor), a.per_row)]
        factors = left + ([] if b.factor is None else [(of_rows(b.factor), b.per_row)])
    return apply_factors(y, factors, a.divisor * b.divisor, out_dtype)


def tokens_by_native_kernel(a: Operand, b: Operand) -> Tensor:
    """Run mm_t_tokens() on E4M3 codes by torch._scaled_grouped_mm, without fast accumulation, to bfloat16."""
    splits, experts, (n, k) = a.layout.splits, b.layout.splits.count, b.layout.one_shape
    left, right = (group.buffers["q"].view(torch.float8_e4m3fn) for group in (a, b))
    rows = a.buffers["s"] if a.format.row_scaled else splits.spread(a.buffers["s"])
    columns = b.buffers["s"].view(experts, -1).expand(experts, n).contiguous()
    return scaled_grouped_mm(
        left.view(splits.rows, k), right.view(experts, n, k).transpose(1, 2), rows, columns,
        offs=splits.ends(left.device), out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip


def weights_by_kernel(a: PackedExact, b: PackedExact, out_dtype: torch.dtype, *, equal: bool = False) -> Tensor:
    """Run mm_t_weights() by torch._grouped_mm, or by torch.bmm for equal splits, and return [experts, n, k]."""
    if equal:
        dw = plain_product(a.stacked(), b.stacked_turned(), _stored(out_dtype))
    else:
        dw = grouped_mm(a.rows().t(), b.rows(), offs=a.layout.splits.ends(a.matrix.device))
    return _by_experts(dw, a, b, out_dtype)


def _by_experts(product: Tensor, a: PackedExact, b: PackedExact, out_dtype: torch.dtype) -> Tensor:
    """Return apply_factors() of a product [experts, m, n] whose sides have factors of experts, or of their rows."""
    groups = [group for group in (a, b) if group.factor is not None]
    if not groups and a.divisor == b.divisor == 1.0:
        return in_dtype(product, out_dtype)
    if not any(group.per_row for group in groups):
        factors = [(group.factor.view(-1, 1), False) for group in groups]
        return apply_factors(product.flatten(1), factors, a.divisor * b.divisor, out_dtype).view_as(product)
    (experts, m, _), factors = product.shape, []
    for group in groups:
        factor = group.factor.view(experts, -1, 1) if group is a else group.factor.view(experts, 1, -1)
        factors.append((factor.expand(experts, m, -1).flatten(0, 1), group.per_row))
    return apply_factors(product.flatten(0, 1), factors, a.divisor * b.divisor, out_dtype).view_as(product)


def _as_rows(product: Tensor) -> Tensor:
    """Return [experts, m, n] as [experts * m, n], in a form that autograd does not treat as a view.

    A Function's output may then be written in place, like torch.matmul's.
    """
    experts, m, n = product.shape
    return unsafe_view(product, (experts * m, n))


def _stored(out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch.bmm stores for an out_dtype. Only factors round a float32 product."""
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32


def _exact(group: Group) -> PackedExact:
    """Return exact matrices in one memory; decode and pack them if necessary."""
    return group if isinstance(group, PackedExact) else _packed(group).operand()


def _packed(group: Operand | Members) -> Operand:
    """Return codes in one memory."""
    if isinstance(group, Operand):
        return group
    first, layout = group.members[0], _layout(group)
    buffers = pack([member.buffers for member in group.members], first.format, layout)
    return Operand(format=first.format, layout=layout, dtype=first.dtype, buffers=buffers)


def _layout(group: Members) -> GroupLayout:
    """Return the layout of members with one shape."""
    rows, width = group.members[0].shape
    return GroupLayout(splits=Splits.uniform(len(group.members), rows), width=width, columnwise=False)
