"""LinearShare: how the ranks of a group share a linear. Exchange: the messages of one call.

column: a rank has rows of W [N, K], and computes columns of y from the whole x. Gradients of x are summed over ranks.
row: a rank has columns of W and of x. The products are summed over ranks to y, and dy is whole.

With a sequence axis the tokens of the whole x or y are split over ranks. It is gathered before the product, and sums
stay split (Korthikanti et al., arXiv 2205.05198).
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
"""Mode -> the tensor to gather, and the tensor to sum, if tokens are split over ranks."""


@dataclass(kw_only=True, eq=False)
class LinearShare:
    """How the ranks of a group share a linear. It cannot be copied, because a group cannot."""

    group: ProcessGroup
    mode: Mode
    sequence: int | None = None
    """The axis of x, or of y, along which tokens are split over ranks; None: every rank has all tokens."""
    pieces: int = 1
    """The number of matrices in the weight, one below the other, that are cut separately, such as q, k and v."""
    sums: bool = True
    """Whether ranks add up their parts of sums; else the caller adds."""

    def part_of(self, tensor: str) -> Part | None:
        """Return the place of a rank's part of a tensor that is cut along its features; None: the rank has all
        features."""
        axis = CUTS[self.mode].get(tensor)
        return None if axis is None else Part(group=self.group, axis=axis, runs=self.pieces)

    def exchange(self, shape: Sequence[int]) -> "Exchange":
        """Return the exchange of a call with an input [*shape, K]."""
        lead, ranks = 1 if self.sequence is None else math.prod(shape[: self.sequence]), self.group.size()
        if self.mode == "row" and self.sequence is not None and shape[self.sequence] % ranks:
            raise UserError(f"{shape[self.sequence]} tokens, along axis {self.sequence}, do not divide by tp={ranks}")
        rows = math.prod(shape)
        return Exchange(parallel=self, lead=lead, rows=rows if self.mode == "column" else rows // ranks)

    def __deepcopy__(self, memo: Any) -> "LinearShare":
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """The messages of the ranks in one call."""

    parallel: LinearShare
    lead: int
    """The number of sequences with split tokens, one after the other."""
    rows: int
    """The number of this rank's tokens, if tokens are split."""
    parts: Mapping[str, Part] = field(init=False)
    """Tensor -> the places of the ranks' parts. A tensor without an entry is whole."""

    def __post_init__(self) -> None:
        own = self.parallel
        cuts = {tensor: own.part_of(tensor) for tensor in CUTS[own.mode]}
        if own.sequence is not None:
            cuts[TOKENS[own.mode][1]] = Part(group=own.group, axis=0, runs=self.lead)
        object.__setattr__(self, "parts", cuts)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """Return the leading axes of y for these leading axes of x."""
        own, shape = self.parallel, list(shape)
        if own.sequence is not None:
            ranks, length = own.group.size(), shape[own.sequence]
            shape[own.sequence] = length * ranks if own.mode == "column" else length // ranks
        return shape

    def tokens(self, tensor: str, rows: int) -> Part | None:
        """Return the place of this rank's rows of the tensor, if they are some of its tokens; None for all tokens."""
        own = self.parallel
        if own.sequence is None or tensor != TOKENS[own.mode][0] or own.group.size() == 1 or rows != self.rows:
            return None
        return Part(group=own.group, axis=0, runs=self.lead)

    def splits_tokens(self, tensor: str) -> bool:
        """Return whether ranks sum the tensor, and each rank keeps its own tokens of the sum."""
        return self.parallel.sequence is not None and tensor == TOKENS[self.parallel.mode][1]

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """Return x [rows, C] of all ranks, if the tensor's tokens are split; else x itself."""
        return self.begin_gathered(tensor, x)()

    def begin_gathered(self, tensor: str, x: Tensor) -> Pending:
        """Start gathered() (parallel.wire.tokens)."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_gather_rows(x, part.group, part.runs)

    def begin_lent(self, tensor: str, x: Tensor) -> Pending:
        """Start gathered(). The result is good until the group's next exchange of rows."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_lent_rows(x, part.group, part.runs)

    def all_read(self, x: Tensor) -> None:
        """Note that all messages of other ranks on x's device are read (parallel.wire.p2p_copy.all_read)."""
        if x.is_cuda:
            p2p_copy.all_read(self.parallel.group, x.device)

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """Start the sum of x over ranks, if each rank has a part of its products; else return x (parallel.wire.tokens).

        The result is the whole sum, or this rank's tokens of it. Only the latter runs beside other work.
        """
        own = self.parallel
        if self.splits_tokens(tensor):
            return begin_sum_rows(x, own.group, self.lead)
        whole = sum_whole(x, own.group) if own.sums and tensor == TOKENS[own.mode][1] else x
        return lambda: whole
