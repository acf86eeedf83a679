"""Exchange: gives every rank the areas of matrices that it needs, from the areas that ranks hold.

A rank may hold any areas: the rows of a shard, a block of rows and columns, or a flat interval, which is up to three
areas. Ranks tell each other their areas once, and derive who sends what. Each run then sends values alone, in one
all-to-all for each dtype, or in none where no rank lacks anything.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.errors import UserError


class Area(NamedTuple):
    """A rectangle of a matrix: rows first_row to before last_row, columns first_col to before last_col."""

    first_row: int
    last_row: int
    first_col: int
    last_col: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return max(self.last_row - self.first_row, 0), max(self.last_col - self.first_col, 0)

    @property
    def size(self) -> int:
        """The number of elements."""
        rows, cols = self.shape
        return rows * cols

    def common(self, other: "Area") -> Self:
        """The elements of both areas; an area of size 0 where there are none."""
        return Area(
            max(self.first_row, other.first_row),
            min(self.last_row, other.last_row),
            max(self.first_col, other.first_col),
            min(self.last_col, other.last_col),
        )

    def of(self, values: Tensor, whole: "Area") -> Tensor:
        """The view of this area in `values` [..., rows, cols], which are the values of the larger area `whole`."""
        rows, cols = self.shape
        return values.narrow(-2, self.first_row - whole.first_row, rows).narrow(
            -1, self.first_col - whole.first_col, cols
        )


def areas_of_interval(start: int, stop: int, cols: int) -> list[Area]:
    """The areas, at most three, of the elements from start to before stop of a matrix [rows, cols], counted row by
    row."""
    areas = []
    while start < stop:
        row, col = divmod(start, cols)
        whole = col == 0 and stop - start >= cols
        rows = (stop - start) // cols if whole else 1
        last = cols if whole else min(cols, col + stop - start)
        areas.append(Area(row, row + rows, col, last))
        start += rows * (last - col)
    return areas


class _Message(NamedTuple):
    """A message from one rank to another: an area of a matrix, within an area that the sender holds."""

    matrix: int
    piece: int
    """The index of the sender's area."""
    held: Area
    area: Area

    def of(self, pieces: Sequence[Sequence[Tensor]]) -> Tensor:
        """The view of the message in the sender's pieces."""
        return self.area.of(pieces[self.matrix][self.piece], self.held)


class Exchange:
    """The exchange of several matrices: each rank says which areas it holds of each matrix, and which area it needs.

    held, needed: one entry for each matrix; all ranks of the group give the same matrices in the same order. The
    constructor is a collective. Where several ranks hold an area, the first one sends it. UserError, the same on all
    ranks, where no rank holds an element that a rank needs.
    """

    def __init__(self, held: Sequence[Sequence[Area]], needed: Sequence[Area], group: Any) -> None:
        self.group, self.needed = group, list(needed)
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        told: list[Any] = [None] * self.world
        own = ([[tuple(area) for area in areas] for areas in held], [tuple(area) for area in needed])
        dist.all_gather_object(told, own, group=group)
        if len({len(areas) for _, areas in told}) > 1:
            counts = ", ".join(str(len(areas)) for _, areas in told)
            raise UserError(f"exchange: ranks of one group bring {counts} matrices; all bring the same ones")
        routes = [[_routes(told, matrix, receiver) for matrix in range(len(held))] for receiver in range(self.world)]
        for receiver, wanted in enumerate(routes):
            for matrix, messages in enumerate(wanted):
                _check_whole(Area(*told[receiver][1][matrix]), messages, f"rank {receiver}", matrix)
        self.sends = [[m for messages in wanted for sender, m in messages if sender == self.rank] for wanted in routes]
        mine = [message for messages in routes[self.rank] for message in messages]
        self.receives = [[m for sender, m in mine if sender == rank] for rank in range(self.world)]
        crossing = [m for to, wanted in enumerate(routes) for message in wanted for rank, m in message if rank != to]
        self.crossing = {message.matrix for message in crossing}
        """The matrices that need a message between ranks."""
        wanted = [[Area(*areas[matrix]) for _, areas in told] for matrix in range(len(held))]
        self.cut_rows = [len({area[2:] for area in areas if area.size}) > 1 for areas in wanted]
        """For each matrix: whether ranks need different columns, so that a row lies on several ranks."""

    def run(self, pieces: Sequence[Sequence[Tensor]], dtypes: Sequence[torch.dtype], device: Any) -> list[Tensor]:
        """The values of the areas needed, [rows, cols] for each matrix. The host does not wait.

        pieces: for each matrix the values of the areas held, [rows, cols] of its dtype on this device. The result is a
        view where a rank holds all that it needs as one piece.
        """
        outputs: list[Tensor | None] = [None] * len(self.needed)
        for message in self.receives[self.rank]:
            if message.area == self.needed[message.matrix]:
                outputs[message.matrix] = message.of(pieces)
        for matrix, area in enumerate(self.needed):
            if outputs[matrix] is None:
                outputs[matrix] = torch.empty(area.shape, dtype=dtypes[matrix], device=device)
                for message in self.receives[self.rank]:
                    if message.matrix == matrix:
                        message.area.of(outputs[matrix], area).copy_(message.of(pieces))
        for dtype in sorted({dtypes[matrix] for matrix in self.crossing}, key=str):
            self._send(pieces, outputs, {m for m in self.crossing if dtypes[m] == dtype}, dtype, device)
        return outputs

    def _send(self, pieces: Any, outputs: list[Tensor], matrices: set[int], dtype: torch.dtype, device: Any) -> None:
        """Send the matrices of one dtype, as bytes, in one all-to-all."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        sends, receives = (
            {rank: [m for m in table[rank] if m.matrix in matrices] for rank in others}
            for table in (self.sends, self.receives)
        )
        sent, received = (
            [sum(m.area.size for m in table.get(rank, ())) * dtype.itemsize for rank in range(self.world)]
            for table in (sends, receives)
        )
        flat = [m.of(pieces).reshape(-1) for rank in others for m in sends[rank]]
        values = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
        dist.all_to_all_single(arrived, values.view(torch.uint8), received, sent, group=self.group)
        values, start = arrived.view(dtype), 0
        for message in (m for rank in others for m in receives[rank]):
            target, size = message.area.of(outputs[message.matrix], self.needed[message.matrix]), message.area.size
            target.copy_(values[start : start + size].view(message.area.shape))
            start += size


def _routes(told: Sequence[Any], matrix: int, receiver: int) -> list[tuple[int, _Message]]:
    """(sender, message) of all messages that bring a rank its area of a matrix, in the order of senders, nothing
    twice."""
    needed, seen, routes = Area(*told[receiver][1][matrix]), set(), []
    for sender, (held, _) in enumerate(told):
        for piece, own in enumerate(held[matrix]):
            area = Area(*own).common(needed)
            if area.size and own not in seen:
                seen.add(own)
                routes.append((sender, _Message(matrix, piece, Area(*own), area)))
    return routes


def _check_whole(needed: Area, messages: Sequence[tuple[int, _Message]], who: str, matrix: int) -> None:
    """UserError unless the messages bring the whole area."""
    held = sum(message.area.size for _, message in messages)
    if held != needed.size:
        raise UserError(
            f"exchange: {who} needs rows {needed.first_row}:{needed.last_row} and columns"
            f" {needed.first_col}:{needed.last_col} of matrix {matrix}, and of these {needed.size} elements its group"
            f" holds {held}; every rank of the group brings its own part of one whole"
        )
