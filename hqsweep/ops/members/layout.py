"""Layout of many matrices' operands (members) in packed buffers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Buffer, Format
from hqsweep.ops.members.splits import Splits, offsets_of


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
