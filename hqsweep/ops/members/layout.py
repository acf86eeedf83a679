"""How the operands of many matrices (members) lie in packed buffers."""

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
        """The shapes of the members, as they are encoded."""
        raise NotImplementedError

    def check(self, format: Format) -> None:
        """UserError, naming the member, for one that the format cannot hold."""
        for member, shape in enumerate(self.shapes):
            try:
                format.check_shape(*shape)
            except UserError as error:
                raise UserError(f"expert {member}: {error}") from None

    def views(self, flat: Tensor, shapes: Sequence[tuple[int, int]], *, by_rows: bool = False) -> list[Tensor]:
        """Members of a packed buffer, which may have room to spare; by_rows: they lie there transposed."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = flat[: sum(sizes)].split_with_sizes(sizes)
        if by_rows:
            return [part.view(shape[::-1]).t() for part, shape in zip(parts, shapes, strict=True)]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer_shapes(self, format: Format, name: str) -> list[tuple[int, int]]:
        """The shapes of one buffer of every member."""
        return [format.layout[name].shape(*shape) for shape in self.shapes]

    def least(self, buffer: Buffer | None) -> int:
        """The fewest entries that a packed buffer can have (None: of elements), those of rows left over included."""
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
        """The layout of the members of a matrix [rows, width]. Made once."""
        return splits.cached("layout", partial(cls._of, splits), width, columnwise)

    @classmethod
    def _of(cls, splits: Splits, width: int, columnwise: bool) -> "GroupLayout":
        return cls(splits=splits, width=width, columnwise=columnwise)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of the members; waits as Splits.host does."""
        return [(self.width, m) if self.columnwise else (m, self.width) for m in self.splits.host]

    @property
    def one_shape(self) -> tuple[int, int]:
        """The shape of all members; UserError, naming one that has another. Waits as Splits.host does."""
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
        """Buffer -> int64 [E + 1] on the device: the first entry of each member in the packed buffer, and the end of
        the last. One launch for all buffers; nothing waits for splits that the device has."""
        divisors, strides = [], []
        for buffer in format.layout.values():
            ragged, other = (buffer.cols, buffer.rows) if self.columnwise else (buffer.rows, buffer.cols)
            divisors.append(ragged)
            strides.append(1 if other == WHOLE else -(-self.width // other))
        return dict(zip(format.layout, offsets_of(self.splits.on(device), divisors, strides), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapesLayout(Layout):
    """Members of unlike widths, which no matrix [rows, width] holds."""

    members: tuple[tuple[int, int], ...]
    """The shape [m_e, k_e] of each member."""
    columnwise: bool

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of the members, as they are encoded."""
        return [(k, m) if self.columnwise else (m, k) for m, k in self.members]

    @property
    def splits(self) -> NoReturn:
        """Asked for by what multiplies all members at once."""
        self.refuse_product()

    def refuse_product(self) -> NoReturn:
        """UserError that names a member."""
        refuse_unlike(self.members, "a grouped product", one_width=True)


def refuse_unlike(
    shapes: Sequence[tuple[int, int]], what: str, *, one_width: bool = False, instead: str = ""
) -> NoReturn:
    """UserError of what takes members of one shape, or of one width; it names the first that has another."""
    first = shapes[0]
    other = next(e for e, (m, k) in enumerate(shapes) if k != first[1] or (m != first[0] and not one_width))
    raise UserError(
        f"{what} takes members of one {'width' if one_width else 'shape'}, and member {other} is"
        f" {list(shapes[other])}, member 0 {list(first)}{instead}"
    )
