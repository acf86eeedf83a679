"""Layout of many matrices' operands (members) in packed buffers, also of members [m_e, k_e] with different shapes.

Members of one width are rows of a matrix, and Splits of this matrix apply. Otherwise no kernel takes them in one call,
unless Shapes.folded finds a matrix.

A packed buffer concatenates the members' flattened compact buffers in member order. So each member is an ordinary
operand whose buffers are views. Every format's rules apply unchanged, and blocks along the ragged axis start anew at
each member. Sizes are exact if the host knows the splits; else ops.quantize.operators.allocations bounds them.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Buffer, Buffers, ExactOperand, Format
from hqsweep.memo import cached_property
from hqsweep.ops.quantize.kernels import KernelSpec
from hqsweep.ops.splits import Splits, offsets_of


class Layout:
    """Base of GroupLayout and ShapesLayout: where the members of a group lie in memory."""

    columnwise: bool
    """Whether members encode the transpose [k_e, m_e] of [m_e, k_e]."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The members' shapes as encoded."""
        raise NotImplementedError

    def check(self, format: Format) -> None:
        """Raise UserError, naming the member, if the format cannot hold a member."""
        for member, shape in enumerate(self.shapes):
            try:
                format.check_shape(*shape)
            except UserError as error:
                raise UserError(f"expert {member}: {error}") from None

    def views(self, flat: Tensor, shapes: Sequence[tuple[int, int]], *, by_rows: bool = False) -> list[Tensor]:
        """Return views of the members in a packed buffer, which may have spare room. by_rows: members are stored
        transposed."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = flat[: sum(sizes)].split_with_sizes(sizes)
        if by_rows:
            return [part.view(shape[::-1]).t() for part, shape in zip(parts, shapes, strict=True)]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer_shapes(self, format: Format, name: str) -> list[tuple[int, int]]:
        """Return the shapes of one buffer, member by member."""
        return [format.layout[name].shape(*shape) for shape in self.shapes]

    def least(self, buffer: Buffer | None) -> int:
        """Return the fewest entries of a packed buffer, trailing padding rows included. None: a buffer with one entry
        an element."""
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupLayout(Layout):
    """Members of one width: member e has the rows splits.spans[e] of a matrix [rows, width]."""

    splits: Splits
    width: int
    columnwise: bool
    """Whether members encode the transpose [width, m_e] of their rows [m_e, width]."""

    @classmethod
    def of(cls, splits: Splits, width: int, *, columnwise: bool) -> "GroupLayout":
        """Return the layout of the members of a matrix [rows, width], made once."""
        return splits.cached("layout", partial(cls._of, splits), width, columnwise)

    @classmethod
    def _of(cls, splits: Splits, width: int, columnwise: bool) -> "GroupLayout":
        return cls(splits=splits, width=width, columnwise=columnwise)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The members' shapes; waits as Splits.host does."""
        return [(self.width, m) if self.columnwise else (m, self.width) for m in self.splits.host]

    @property
    def one_shape(self) -> tuple[int, int]:
        """The common shape of all members; waits as Splits.host does. UserError names a member with another shape."""
        rows = self.splits.equal
        if not rows and any(self.splits.host):
            refuse_unlike(self.shapes, "this operand of a grouped product")
        return (self.width, rows) if self.columnwise else (rows, self.width)

    def least(self, buffer: Buffer | None) -> int:
        rows, width = self.splits.rows, self.width
        if buffer is None:
            return rows * width
        return math.prod(buffer.shape(*((width, rows) if self.columnwise else (rows, width))))

    def starts(self, format: Format, device: torch.device) -> dict[str, Tensor]:
        """Return buffer -> int64 [E + 1]: each member's first entry in the packed buffer, and the end of the last
        member.

        One launch serves all buffers, on the device; nothing waits for splits.
        """
        divisors, strides = [], []
        for buffer in format.layout.values():
            ragged, other = (buffer.cols, buffer.rows) if self.columnwise else (buffer.rows, buffer.cols)
            divisors.append(ragged)
            strides.append(1 if other == WHOLE else -(-self.width // other))
        return dict(zip(format.layout, offsets_of(self.splits.on(device), divisors, strides), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapesLayout(Layout):
    """Members of different widths, which do not form a matrix [rows, width]."""

    members: tuple[tuple[int, int], ...]
    """The shape [m_e, k_e] of each member."""
    columnwise: bool

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The members' shapes as encoded."""
        return [(k, m) if self.columnwise else (m, k) for m, k in self.members]

    @property
    def splits(self) -> NoReturn:
        """UserError: products of all members at once ask for splits, and there are none."""
        self.refuse_product()

    def refuse_product(self) -> NoReturn:
        """Raise UserError that names a member."""
        refuse_unlike(self.members, "a grouped product", one_width=True)


def refuse_unlike(
    shapes: Sequence[tuple[int, int]], what: str, *, one_width: bool = False, instead: str = ""
) -> NoReturn:
    """Raise UserError for members that differ in shape, or in width; it names the first one that differs."""
    first = shapes[0]
    other = next(e for e, (m, k) in enumerate(shapes) if k != first[1] or (m != first[0] and not one_width))
    raise UserError(
        f"{what} takes members of one {'width' if one_width else 'shape'}, and member {other} is"
        f" {list(shapes[other])}, member 0 {list(first)}{instead}"
    )


WIDEST = 4096
"""The most columns of a folded matrix. Kernels work in tiles; fewer rows would leave tiles partly empty."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of members in a flat buffer, as Splits has sizes of members in a matrix; hashable."""

    members: tuple[tuple[int, int], ...]
    """The shape [m_e, k_e] of each member."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]]) -> "Shapes":
        """Return the Shapes of at least one member. UserError for a shape other than [rows, columns]."""
        members = tuple(tuple(map(operator.index, shape)) for shape in shapes)
        for member, shape in enumerate(members):
            if len(shape) != 2 or min(shape) < 0:
                raise UserError(f"member {member} of a group has the shape {list(shape)}; it takes [rows, columns]")
        if not members:
            raise UserError("a group has one member or more, and no shapes were given")
        return cls(members)

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.members)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each member."""
        return [math.prod(shape) for shape in self.members]

    @cached_property
    def total(self) -> int:
        """Elements of all members."""
        return sum(self.sizes)

    @cached_property
    def width(self) -> int | None:
        """The common number of columns, or None."""
        widths = {k for _, k in self.members}
        return widths.pop() if len(widths) == 1 else None

    @cached_property
    def equal(self) -> tuple[int, int] | None:
        """The common shape, or None."""
        return self.members[0] if len(set(self.members)) == 1 else None

    @cached_property
    def splits(self) -> Splits:
        """The splits of the matrix [rows, width] that members of one width form."""
        rows = tuple(m for m, _ in self.members)
        return Splits(rows=sum(rows), count=self.count, sizes=rows)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return views [m_e, k_e] of a flat buffer, which may have spare room."""
        pieces = flat[: self.total].split_with_sizes(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.members, strict=True)]

    def layout(self, *, columnwise: bool) -> Layout:
        """Return the layout of the operands: a GroupLayout for members of one width."""
        if self.width is not None:
            return GroupLayout.of(self.splits, self.width, columnwise=columnwise)
        return ShapesLayout(members=self.members, columnwise=columnwise)

    def folded(self, format: Format) -> tuple[int, Splits] | None:
        """Return (width, splits) of a matrix over the same elements whose members have the same packed operands, or
        None.

        It exists for formats whose blocks lie within a row and fill it, so that row ends do not matter.
        """
        columns, width = math.gcd(*(k for _, k in self.members)), math.gcd(*self.sizes, WIDEST)
        for buffer in format.layout.values():
            if (buffer.rows, buffer.cols) == (WHOLE, WHOLE):
                continue
            if buffer.rows != 1 or buffer.cols == WHOLE or columns % buffer.cols or width % buffer.cols:
                return None
        sizes = tuple(size // width for size in self.sizes)
        return width, Splits(rows=sum(sizes), count=self.count, sizes=sizes)


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
