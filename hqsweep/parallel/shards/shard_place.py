"""Place: where a shard lies in its whole weight, and which rows of the whole its operands encode.

Where a cut divides a block, every rank with a part of the block encodes all of it, from the values of all its rows. So
the buffers of a shard are ordinary operands, with the bytes of the whole. The rows (and columns) of such an operand are
the *cover* of the shard. A cover ends where blocks end, or where the whole ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hqsweep.errors import UserError
from hqsweep.formats import Format, RngKey
from hqsweep.formats.random import PlacedKey, RngNumber
from hqsweep.parallel.wire.exchange import Area


@dataclass(frozen=True)
class Place:
    """The place of a matrix [rows, cols] in its whole logical weight [rows_of_whole, cols_of_whole]."""

    first_row: int
    first_col: int
    rows_of_whole: int
    cols_of_whole: int

    def area(self, shape: tuple[int, int]) -> Area:
        """The rows and columns of the whole that a shard of this shape has. UserError for a shard that reaches beyond
        the whole."""
        area = Area(self.first_row, self.first_row + shape[0], self.first_col, self.first_col + shape[1])
        if min(area) < 0 or area.last_row > self.rows_of_whole or area.last_col > self.cols_of_whole:
            raise UserError(
                f"a shard {tuple(shape)} at row {self.first_row} and column {self.first_col} does not lie in a whole of"
                f" {self.rows_of_whole} rows and {self.cols_of_whole} columns"
            )
        return area

    def cover(self, format: Format, direction: str, rows: int) -> tuple[int, int]:
        """(first, last + 1): the rows of the whole that this direction's operand of a shard encodes. rows: the shard's
        number.

        They are the shard's own rows where it cuts no block. An empty shard has an empty cover.
        """
        return _widened(self.first_row, rows, blocks(format, direction)[0], self.rows_of_whole)

    def cover_columns(self, format: Format, direction: str, cols: int) -> tuple[int, int]:
        """cover() for columns."""
        return _widened(self.first_col, cols, blocks(format, direction)[1], self.cols_of_whole)

    def cover_area(self, format: Format, direction: str, shape: tuple[int, int]) -> Area:
        """Return the area of the whole that this direction's operand of a shard of this shape encodes."""
        rows, cols = self.cover(format, direction, shape[0]), self.cover_columns(format, direction, shape[1])
        return Area(*rows, *cols)

    def sources(self, formats: Sequence[tuple[Format, str]], shape: tuple[int, int]) -> Area:
        """Return the area of the whole whose values make all these operands, given as (format, direction).

        It has whole blocks of every operand, also if one operand is made from the decoded values of another.
        """
        down, across = (math.lcm(*(blocks(*pair)[axis] for pair in formats)) for axis in (0, 1))
        rows = _widened(self.first_row, shape[0], down, self.rows_of_whole)
        return Area(*rows, *_widened(self.first_col, shape[1], across, self.cols_of_whole))

    @classmethod
    def of(cls, area: Area, whole: tuple[int, int]) -> "Place":
        """Return the place of a matrix with this area in a whole of this shape."""
        return cls(area.first_row, area.first_col, *whole)

    @property
    def whole(self) -> tuple[int, int]:
        """The shape of the whole."""
        return self.rows_of_whole, self.cols_of_whole

    def key(self, key: RngKey | RngNumber, direction: str) -> PlacedKey:
        """The key of this direction's operand. Each element draws the same bits as in the whole operand."""
        if direction == "rowwise":
            return PlacedKey(key, self.first_row, self.first_col, self.cols_of_whole)
        return PlacedKey(key, self.first_col, self.first_row, self.rows_of_whole)


def blocks(format: Format, direction: str) -> tuple[int, int]:
    """(rows, columns) of a weight that this direction's operand encodes together.

    They share a scale, a byte, a Hadamard group, or the random bytes of one draw. An entry for a whole axis does not
    count.
    """
    down = math.lcm(*(buffer.rows or 1 for buffer in format.layout.values()))
    across = math.lcm(format.column_multiple, *(buffer.cols or 1 for buffer in format.layout.values()))
    return (down, across) if direction == "rowwise" else (across, down)


def _widened(first: int, count: int, block: int, whole: int) -> tuple[int, int]:
    if count == 0:
        return first, first
    return first // block * block, min(-(-(first + count) // block) * block, whole)
