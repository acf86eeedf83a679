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
"""Rows of a rank from which products are formed by ranks; of fewer a launch costs more than what it hides."""
OneOperand = Operand | ExactOperand
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """The rowwise operand of all tokens by the rows of each rank."""

    part: Part
    rows: int
    """The rows of each rank."""
    of_rank: Callable[[int], OneOperand]
    """A rank's rows; those of another rank wait until they have arrived."""
    by_halves: bool = False
    """Whether a sum of the product sends another rank the first half of its rows while the second is formed. Where not,
    what is computed for own rows takes longer than rows travel."""

    @property
    def pieces(self) -> int:
        """The number of equal pieces of another rank's rows that leave one by one."""
        return 2 if self.by_halves and self.rows % 2 == 0 and self.rows >= 2 * LEAST_ROWS else 1

    @property
    def order(self) -> list[tuple[int, Span]]:
        """Each rank with its rows in the whole, in the order in which they are multiplied: this one first."""
        rank, world = self.part.group.rank(), self.part.group.size()
        ranks = [rank, *(other for other in range(world) if other != rank)]
        return [(each, span(each, self.rows)) for each in ranks]

    def product(self, b: OneOperand, out_dtype: torch.dtype) -> Tensor:
        """mm_t of the whole and b."""
        b, y = decoded(b), None
        for rank, (start, stop) in self.order:
            a = decoded(self.of_rank(rank))
            if y is None:
                y = a.matrix.new_empty((self.rows * self.part.group.size(), len(b.matrix)), dtype=out_dtype)
            mm_t(a, b, out_dtype=out_dtype, out=y[start:stop])
        return y


def span(rank: int, rows: int) -> Span:
    """The rows of a rank in the whole."""
    return rank * rows, (rank + 1) * rows


def decoded(operand: OneOperand) -> ExactOperand:
    """The operand as a product takes it."""
    return operand.operand() if isinstance(operand, Operand) else operand
