"""Operands of many matrices in one memory: one packed buffer per buffer of the format.

A packed buffer concatenates the members' flattened compact buffers in member order. So each member is an ordinary
operand whose buffers are views. Every format's rules apply unchanged, and blocks along the ragged axis start anew at
each member. Sizes are exact if the host knows the splits; else ops.quantize.operators.allocations bounds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.memo import cached_property
from hqsweep.ops.members.layout import Layout
from hqsweep.ops.quantize.kernels import KernelSpec

Result = dict[str, Tensor] | ExactOperand
"""One direction of quantize(): the format's buffers, or the exact operand that gemm=exact multiplies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedExact(ExactOperand):
    """The members' ExactOperands in one memory.

    matrix: flat, members concatenated. factor: float32, flat, one entry per member, or per row of each member if
    per_row.
    """

    layout: Layout
    by_rows: bool
    """Whether columnwise members are stored as [m_e, width] and read transposed."""
    per_row: bool

    @cached_property
    def members(self) -> list[ExactOperand]:
        """One ExactOperand per member, as views; waits as Splits.host does."""
        shapes = self.layout.shapes
        matrices = self.layout.views(self.matrix, shapes, by_rows=self.by_rows)
        factors: Sequence[Tensor | None] = [None] * len(matrices)
        if self.factor is not None:
            tall = [(rows if self.per_row else 1, 1) for rows, _ in shapes]
            factors = self.layout.views(self.factor, tall)
        return [ExactOperand(m, f, self.divisor) for m, f in zip(matrices, factors, strict=True)]

    def stacked(self) -> Tensor:
        """Return [E, r, c], a view, for members of one shape [r, c]; waits as `members` does."""
        count, (r, c) = self.layout.splits.count, self.layout.one_shape
        return self.matrix.view(count, c, r).mT if self.by_rows else self.matrix.view(count, r, c)

    def stacked_turned(self) -> Tensor:
        """Return stacked().mT, [E, c, r]."""
        count, (r, c) = self.layout.splits.count, self.layout.one_shape
        return self.matrix.view(count, c, r) if self.by_rows else self.matrix.view(count, r, c).mT

    def rows(self) -> Tensor:
        """Return [rows, width]: the members of a columnwise group, transposed and concatenated along rows."""
        if self.by_rows or not self.layout.columnwise:
            return self.matrix.view(self.layout.splits.rows, self.layout.width)
        return torch.cat([member.matrix.t() for member in self.members])


def take(
    outputs: list[Tensor],
    spec: KernelSpec,
    exact: bool,
    amax: Tensor | None,
    layout: Layout | None = None,
    by_rows: bool = False,
) -> tuple[Result, list[Tensor]]:
    """Return one direction's result from the operator's outputs, and the remaining outputs. amax: the given amax."""
    held = amax if spec.amax_name == "g" else None
    if held is not None and layout is None and held.dim() != 2:
        held = held.view(-1, 1)
    if not exact:
        buffers = dict(zip(spec.names, outputs, strict=False))
        if held is None:
            return buffers, outputs[len(spec.names) :]
        buffers["g"] = held
        return buffers, outputs[len(spec.names) - 1 :]
    count = 2 if spec.amax_name and held is None else 1
    factor = outputs[1] if count == 2 else held
    if layout is None:
        return ExactOperand(outputs[0], factor, spec.divisor), outputs[count:]
    kwargs = {"layout": layout, "by_rows": by_rows, "per_row": spec.row_scaled}
    return PackedExact(outputs[0], factor, spec.divisor, **kwargs), outputs[count:]


def stored_by_rows(format: Format, columnwise: bool) -> bool:
    """Return whether columnwise members are stored as their rows [m, width] and read transposed.

    An identity keeps the given matrix, so both directions share one memory.
    """
    return columnwise and format.high_precision


def held_exact(held: Tensor, format: Format, layout: Layout) -> PackedExact:
    """Return the exact operands of an identity, stored by rows in both directions."""
    held = held if format.fits_bf16 else held.float()
    by_rows = stored_by_rows(format, layout.columnwise)
    return PackedExact(held, layout=layout, by_rows=by_rows, per_row=False)


def member_buffers(buffers: Buffers, format: Format, layout: Layout) -> list[dict[str, Tensor]]:
    """Return the buffers of each member, as views; waits as Splits.host does."""
    by_rows, views = stored_by_rows(format, layout.columnwise), {}
    for name in format.layout:
        views[name] = layout.views(buffers[name], layout.buffer_shapes(format, name), by_rows=by_rows)
    return [dict(zip(views, own, strict=True)) for own in zip(*views.values(), strict=True)]


def pack(
    members: Sequence[Result | None], format: Format | None, layout: Layout, *, by_rows: bool = False
) -> Result | None:
    """Return the members' results of one direction in one memory, zero-padded to the splits' rows. None for None.

    by_rows: store exact columnwise members as [m_e, width].
    """
    if format is None or members[0] is None:
        return None
    by_rows = by_rows and isinstance(members[0], ExactOperand) and layout.columnwise
    by_rows = by_rows or stored_by_rows(format, layout.columnwise)
    if not isinstance(members[0], ExactOperand):
        return {
            name: _flat([member[name] for member in members], by_rows, layout.least(buffer))
            for name, buffer in format.layout.items()
        }
    matrix = _flat([member.matrix for member in members], by_rows, layout.least(None))
    factors, factor = [member.factor for member in members], None
    if factors[0] is not None:
        factor = _flat(factors, False, layout.least(format.layout[format.amax_name]))
    kwargs = {"layout": layout, "by_rows": by_rows, "per_row": format.row_scaled}
    return PackedExact(matrix, factor, members[0].divisor, **kwargs)


def _flat(tensors: list[Tensor], by_rows: bool, least: int) -> Tensor:
    """Return the concatenated entries, zero-padded to `least` entries."""
    count, start = sum(t.numel() for t in tensors), 0
    if not by_rows:
        alike = count >= least and len({t.shape[1:] for t in tensors}) == 1  # cat then needs no launch per tensor
        parts = tensors if alike else [*(t.reshape(-1) for t in tensors), tensors[0].new_zeros(max(least - count, 0))]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1)
    flat = tensors[0].new_empty(max(count, least))
    flat[count:].zero_()
    for t in tensors:
        flat[start : start + t.numel()].view(t.shape[::-1]).copy_(t.t())
        start += t.numel()
    return flat
