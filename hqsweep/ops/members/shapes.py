"""Groups whose members [m_e, k_e] have any shapes, one after the other in a flat buffer.

Members of one width are rows of a matrix, and Splits of this matrix apply. Otherwise no kernel takes them in one call,
unless `folded` finds a matrix.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Format
from hqsweep.memo import cached_property
from hqsweep.ops.members.layout import GroupLayout, Layout, ShapesLayout
from hqsweep.ops.members.splits import Splits

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
