"""Shards of a held tensor: their place in the whole, and how their bytes are cut, packed and put together again.

A sharded tensor is cut along its first axis as by torch.chunk, so that the last shards may be shorter or empty. Or it
is cut along another axis into equal parts: the columns of a matrix, or the rows or columns of every expert's matrix.
Everything follows from the layouts of the formats. A buffer has entries along the cut axis, and a rank holds the
entries that its rows read. Ranks whose rows share an entry all hold it, with the same bytes.

Place says where a shard lies in its whole weight, and which rows of the whole its operands encode. Where a cut divides
a block, every rank with a part of the block encodes all of it, from the values of all its rows. So the buffers of a
shard are ordinary operands, with the bytes of the whole. The rows (and columns) of such an operand are the *cover* of
the shard. A cover ends where blocks end, or where the whole ends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Format, RngKey
from hqsweep.formats.random import PlacedKey, RngNumber
from hqsweep.memo import memo
from hqsweep.ops.layout import stored_by_rows
from hqsweep.parallel.wire import memory
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


@dataclass(frozen=True)
class Cut:
    """The cut of a tensor of `shape` and `metadata` into parts of `each` experts, rows or columns, along `dim`."""

    metadata: Any
    """The tensor's Metadata."""
    shape: tuple[int, ...]
    each: int
    dim: int = 0
    """The axis of the tensor that is cut."""

    @classmethod
    def of(cls, metadata: Any, shape: Sequence[int], each: int, dim: int = 0) -> "Cut":
        """The cut of a tensor with this metadata, leaving out the key of random bits, which changes with every write.

        IndexError, in torch's words, for an axis that the tensor does not have.
        """
        axes = len(shape)
        if not -axes <= dim < axes:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-axes}, {axes - 1}], but got {dim})"
            )
        return cls(replace(metadata, key=None), tuple(shape), each, dim % axes)

    @property
    def of_experts(self) -> bool:
        """Whether a group is cut between its experts."""
        return self.metadata.content.splits is not None and self.dim == 0

    @property
    def axis(self) -> int:
        """The axis of the matrix, or of every expert's matrix, that is cut: 0 for rows, 1 for columns."""
        return int(self.dim > 0 and self.dim == len(self.shape) - 1)

    def shape_of(self, size: int) -> tuple[int, ...]:
        """Return the shape of a part with `size` rows, experts or columns."""
        return tuple(size if dim == self.dim else length for dim, length in enumerate(self.shape))

    def span(self, rank: int) -> tuple[int, int]:
        """(first, last + 1): the rows, experts or columns of a rank's part."""
        size = self.shape[self.dim]
        return min(rank * self.each, size), min((rank + 1) * self.each, size)

    def part(self, start: int, stop: int) -> Any:
        """The Metadata of the part from start to before stop, with its place in the whole, or its first expert."""
        meta = self.metadata
        if self.of_experts:
            return replace(meta, content=meta.content.part(start, stop))
        matrix = list(meta.content.each)
        whole = meta.place or Place(0, 0, *matrix)
        matrix[self.axis] = (stop - start) * self.factor
        first = [whole.first_row, whole.first_col]
        first[self.axis] += start * self.factor
        place = replace(whole, first_row=first[0], first_col=first[1])
        return replace(meta, content=meta.content.of_each(tuple(matrix)), place=place)

    @property
    def factor(self) -> int:
        """The rows, or columns, of the matrix in each entry of the cut axis."""
        return self.metadata.content.each[self.axis] // self.shape[self.dim]

    def along(self, direction: str) -> int:
        """The axis of an operand that is cut."""
        return self.axis if direction == "rowwise" else 1 - self.axis

    def covered(self, metadata: Any, direction: str) -> tuple[int, int]:
        """(first, last + 1): the rows, or columns, of the whole that a part's operand of this direction encodes."""
        cover = metadata.cover(direction)
        return cover[2 * self.axis], cover[2 * self.axis + 1]


@dataclass(frozen=True)
class BufferCut:
    """The cut of one buffer. Its entries form a matrix `shape`, or one for every expert, cut along `axis`."""

    shape: tuple[int, ...]
    axis: int
    spans: tuple[tuple[int, int], ...]
    """The entries of each rank along the axis."""
    skipped: tuple[int, ...]
    """The number of entries at the start of each rank's buffer that other ranks send."""
    dtype: torch.dtype
    whole: bool
    """Whether every rank has all entries, such as the scale of a whole tensor."""

    @property
    def nbytes(self) -> int:
        """The bytes that each rank sends, padded to the rank with most."""
        most = max(last - first for first, last in self.spans)
        return math.prod(self._part(most)) * self.dtype.itemsize

    def _part(self, size: int) -> list[int]:
        """Return the shape of a part with `size` entries along the axis."""
        return [size if axis == self.axis else length for axis, length in enumerate(self.shape)]

    @property
    def in_place(self) -> bool:
        """Whether the messages of all ranks, one after the other, are the buffer itself, or begin with it."""
        return self.whole or (self.even and math.prod(self.shape[: self.axis]) == 1)

    @property
    def even(self) -> bool:
        """Whether all ranks have equally many entries, and no two ranks the same entries."""
        size = self.spans[0][1]
        return all(span == (rank * size, (rank + 1) * size) for rank, span in enumerate(self.spans))

    def pack(self, shard: Tensor, rank: int) -> Tensor:
        """uint8 [nbytes]: the bytes that a rank sends of its buffer.

        It is a copy only where the buffer is shorter than another rank's, or has entries that are not sent.
        """
        if not self.whole:
            first, last = self.spans[rank]
            shard = shard.view(self._part(-1 if shard.numel() else 0))
            shard = shard.narrow(self.axis, self.skipped[rank], last - first)
        own = shard.contiguous().view(-1).view(torch.uint8)
        return own if own.numel() == self.nbytes else torch.cat([own, own.new_zeros(self.nbytes - own.numel())])

    def unpack(self, gathered: Tensor, buffer: Tensor) -> None:
        """Write the messages of all ranks, uint8 [ranks * nbytes], into the buffer of the whole."""
        parts, buffer = gathered.view(len(self.spans), -1), buffer.view(self.shape)
        if self.whole:
            buffer.copy_(parts[0].view(self.dtype).view(self.shape))
        elif self.even:
            ordered, arrived = self.turned(gathered, buffer)
            ordered.copy_(arrived)
        else:
            self._unpack_each(parts, buffer)

    def turned(self, gathered: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """(buffer, messages): views of the whole buffer and of all messages with the same order of entries, for an even
        cut.

        Entries are viewed in the units of parallel.wire.memory.
        """
        ranks = len(self.spans)
        parts = gathered.view(self.dtype).view(ranks, *self._part(self.shape[self.axis] // ranks))
        arrived = parts.movedim(0, self.axis)
        return tuple(memory.as_words(buffer.view(arrived.shape), arrived))

    def _unpack_each(self, parts: Tensor, buffer: Tensor) -> None:
        for part, (first, last) in zip(parts, self.spans, strict=True):
            shape = self._part(last - first)
            own = part[: math.prod(shape) * self.dtype.itemsize]
            buffer.narrow(self.axis, first, last - first).copy_(own.view(self.dtype).view(shape))


@memo
def buffer_cuts(cut: Cut, ranks: int) -> Mapping[str, BufferCut]:
    """Return buffer name, such as "rowwise_q" -> its cut over this number of ranks."""
    return {f"{direction}_{name}": _buffer_cut(cut, ranks, direction, name) for direction, name in cut.metadata.stored}


def _buffer_cut(cut: Cut, ranks: int, direction: str, name: str) -> BufferCut:
    meta, spans = cut.metadata, [cut.span(rank) for rank in range(ranks)]
    dtype, shape = meta.buffer(direction, name)
    if cut.of_experts:
        experts = cut.shape[0]
        entries = (experts, math.prod(shape) // experts)
        return BufferCut(entries, 0, tuple(spans), (0,) * ranks, dtype, whole=False)
    along, format = cut.along(direction), getattr(meta.quantizer, direction)
    divisor = (format.layout[name].rows, format.layout[name].cols)[along]
    axis = along
    if meta.content.splits is not None:
        rows, cols = meta.member(0).buffer(direction, name)[1]
        turned = stored_by_rows(format, direction == "columnwise")
        shape = (meta.content.count, cols, rows) if turned else (meta.content.count, rows, cols)
        axis = 1 + (cut.axis if turned else along)
    if divisor == WHOLE:
        return BufferCut(shape, axis, ((0, 1),) * ranks, (0,) * ranks, dtype, whole=True)
    place, covered = meta.place, 0 if meta.place is None else cut.covered(meta, direction)[0]
    origin = 0 if place is None else (place.first_row, place.first_col)[cut.axis]
    entries, skipped = [], []
    for start, stop in spans:
        first, last = (origin + start * cut.factor) // divisor, -(-(origin + stop * cut.factor) // divisor)
        cover = cut.covered(cut.part(start, stop), direction)[0] if stop > start else origin + start * cut.factor
        first, last = (first, last) if stop > start else (first, first)
        entries.append((first - covered // divisor, last - covered // divisor))
        skipped.append(first - cover // divisor)
    return BufferCut(shape, axis, tuple(entries), tuple(skipped), dtype, whole=False)
