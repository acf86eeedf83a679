"""LinearShare: how the ranks of a group share a linear, and Exchange: what they exchange in a call of it.

column: a rank has rows of W [N, K], and makes columns of y of the whole x; the gradients of x are summed over ranks.
row: a rank has columns of W and of x; the products are summed over ranks to y, and dy is whole. With a sequence axis
the whole x, or y, lies split along its tokens: it is gathered, and what is summed is left split (Korthikanti et al.,
arXiv 2205.05198).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.parallel.shards.shard_part import CUTS, Mode, Part
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.tokens import (
    Pending,
    begin_gather_rows,
    begin_lent_rows,
    begin_sum_rows,
    sum_whole,
)

TOKENS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"column": ("input", "grad_input"), "row": ("grad_output", "output")}
)
"""Mode -> the tensor that is gathered, and the one that is summed, where tokens lie split over ranks."""


@dataclass(kw_only=True, eq=False)
class LinearShare:
    """How the ranks of a group share a linear. It has no copies, as a group has none."""

    group: ProcessGroup
    mode: Mode
    sequence: int | None = None
    """The axis of x, or of y, along which tokens lie split over ranks; None: every rank has them all."""
    pieces: int = 1
    """Matrices that lie one below the other in the weight, each of which is cut for itself, as q, k and v."""
    sums: bool = True
    """Whether ranks sum what each has a part of the sums of; else it is left to the caller."""

    def part_of(self, tensor: str) -> Part | None:
        """Where a rank's part of a tensor lies that is cut along its features; None: it has all features."""
        axis = CUTS[self.mode].get(tensor)
        return None if axis is None else Part(group=self.group, axis=axis, runs=self.pieces)

    def exchange(self, shape: Sequence[int]) -> "Exchange":
        """The exchange of a call with an input [*shape, K]."""
        lead, ranks = 1 if self.sequence is None else math.prod(shape[: self.sequence]), self.group.size()
        if self.mode == "row" and self.sequence is not None and shape[self.sequence] % ranks:
            raise UserError(f"{shape[self.sequence]} tokens, along axis {self.sequence}, do not divide by tp={ranks}")
        rows = math.prod(shape)
        return Exchange(parallel=self, lead=lead, rows=rows if self.mode == "column" else rows // ranks)

    def __deepcopy__(self, memo: Any) -> "LinearShare":
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What ranks exchange in one call."""

    parallel: LinearShare
    lead: int
    """The number of sequences whose tokens lie split, one after the other."""
    rows: int
    """The number of this rank's tokens, where they lie split."""
    parts: Mapping[str, Part] = field(init=False)
    """Tensor -> where the parts lie that ranks have of it; a tensor that is not named is whole."""

    def __post_init__(self) -> None:
        own = self.parallel
        cuts = {tensor: own.part_of(tensor) for tensor in CUTS[own.mode]}
        if own.sequence is not None:
            cuts[TOKENS[own.mode][1]] = Part(group=own.group, axis=0, runs=self.lead)
        object.__setattr__(self, "parts", cuts)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The leading axes of y, of an x with these."""
        own, shape = self.parallel, list(shape)
        if own.sequence is not None:
            ranks, length = own.group.size(), shape[own.sequence]
            shape[own.sequence] = length * ranks if own.mode == "column" else length // ranks
        return shape

    def tokens(self, tensor: str, rows: int) -> Part | None:
        """Where this rank's rows of the tensor lie, if they are some of its tokens; None if they are all."""
        own = self.parallel
        if own.sequence is None or tensor != TOKENS[own.mode][0] or own.group.size() == 1 or rows != self.rows:
            return None
        return Part(group=own.group, axis=0, runs=self.lead)

    def splits_tokens(self, tensor: str) -> bool:
        """Whether the tensor is summed over ranks, each of which keeps its tokens of the sum."""
        return self.parallel.sequence is not None and tensor == TOKENS[self.parallel.mode][1]

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """x [rows, C] of all ranks, where this tensor lies split along its tokens; else x itself."""
        return self.begin_gathered(tensor, x)()

    def begin_gathered(self, tensor: str, x: Tensor) -> Pending:
        """gathered(), begun (parallel.wire.tokens)."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_gather_rows(x, part.group, part.runs)

    def begin_lent(self, tensor: str, x: Tensor) -> Pending:
        """begin_gathered(), good until ranks of the group begin to exchange other rows."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_lent_rows(x, part.group, part.runs)

    def all_read(self, x: Tensor) -> None:
        """Say that all that other ranks sent to x's device has been read (parallel.wire.p2p_copy.all_read)."""
        if x.is_cuda:
            p2p_copy.all_read(self.parallel.group, x.device)

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """The sum over ranks of x where each has a part of its products, or this rank's tokens of the sum; x itself
        where every rank has whole products. It is begun where each rank keeps its tokens (parallel.wire.tokens)."""
        own = self.parallel
        if self.splits_tokens(tensor):
            return begin_sum_rows(x, own.group, self.lead)
        whole = sum_whole(x, own.group) if own.sums and tensor == TOKENS[own.mode][1] else x
        return lambda: whole
