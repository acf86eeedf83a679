"""RankRows: the rowwise operand of all tokens by the rows of each rank, in the order in which they are multiplied."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.quant.operand import Operand

LEAST_ROWS = 2048
"""The least rows of a rank for a product by ranks. For fewer, a launch costs more than it hides."""
OneOperand = Operand | ExactOperand
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """The rowwise operand of all tokens by the rows of each rank."""

    part: Part
    rows: int
    """The rows of each rank."""
    of_rank: Callable[[int], OneOperand]
    """Returns a rank's rows; waits for rows of another rank to arrive."""
    by_halves: bool = False
    """Whether a summed product sends another rank the first half of its rows while the second half is computed.

    False if this rank's own rows take longer to compute than rows take to travel.
    """

    @property
    def pieces(self) -> int:
        """The number of equal pieces of another rank's rows that are sent one by one."""
        return 2 if self.by_halves and self.rows % 2 == 0 and self.rows >= 2 * LEAST_ROWS else 1

    @property
    def order(self) -> list[tuple[int, Span]]:
        """Each rank with the span of its rows in the whole, in the order of multiplication: this rank first."""
        rank, world = self.part.group.rank(), self.part.group.size()
        ranks = [rank, *(other for other in range(world) if other != rank)]
        return [(each, span(each, self.rows)) for each in ranks]

    def product(self, b: OneOperand, out_dtype: torch.dtype) -> Tensor:
        """Return mm_t of the whole and b."""
        b, y = decoded(b), None
        for rank, (start, stop) in self.order:
            a = decoded(self.of_rank(rank))
            if y is None:
                y = a.matrix.new_empty((self.rows * self.part.group.size(), len(b.matrix)), dtype=out_dtype)
            mm_t(a, b, out_dtype=out_dtype, out=y[start:stop])
        return y


def span(rank: int, rows: int) -> Span:
    """Return the rows of a rank in the whole."""
    return rank * rows, (rank + 1) * rows


def decoded(operand: OneOperand) -> ExactOperand:
    """Return the operand as a product takes it."""
    return operand.operand() if isinstance(operand, Operand) else operand


def hides(x: Tensor) -> bool:
    """Return whether a product of the rows x hides messages that travel meanwhile.

    On a CPU nothing travels beside a product, and a library may add in another order for other numbers of rows.
    """
    return x.is_cuda and len(x) >= LEAST_ROWS
