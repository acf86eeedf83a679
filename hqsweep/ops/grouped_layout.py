"""How the operands of the experts of a group lie in memory: one packed buffer for each buffer of the format.

A packed buffer is the concatenation, in expert order, of the flattened compact buffers that the members would have by
themselves. So a member is an operand like any other, whose buffers are views; the rules of every format apply to it
unchanged, and blocks along the ragged axis start again at each expert. Sizes are exact where the splits are known to
the host; otherwise kernel_grouped.packed_allocations bounds them.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, Buffer, ExactOperand, Format
from hqsweep.ops.kernel_grouped import split_offsets
from hqsweep.ops.member_layout import MemberLayout, refuse_unlike
from hqsweep.ops.plan import has_kernels

INT64_MAX = 2**63 - 1
INTEGERS = (torch.int64, torch.int32)


def splits_to_offsets(splits: Sequence[int] | Tensor, stride: int = 1, *, check: bool = False) -> Tensor:
    """Sizes [E] -> int64 [E + 1] on their device: 0, then stride times the sum of the first, the first two and so on.

    Sizes may be negative. UserError where a value leaves int64: always on the CPU; on a GPU with `check`, which waits
    for it, and otherwise values wrap. One launch.
    """
    if isinstance(splits, Tensor) and (splits.dtype not in INTEGERS or splits.dim() != 1):
        raise UserError(f"splits are {splits.dtype} {tuple(splits.shape)}; they take int32 or int64 with one axis")
    if isinstance(splits, Tensor) and (splits.device.type != "cpu" or has_kernels("cpu")):
        try:
            return offsets_of(splits, [1], [stride], check)[0]
        except OverflowError:
            raise UserError(f"offsets of {len(splits)} splits times {stride} leave the range of int64") from None
    sizes = splits.tolist() if isinstance(splits, Tensor) else [int(size) for size in splits]
    offsets = [total * stride for total in accumulate(sizes, initial=0)]
    if max(offsets) > INT64_MAX or min(offsets) < -INT64_MAX - 1:
        raise UserError(f"offsets of {len(sizes)} splits times {stride} leave the range of int64")
    return torch.tensor(offsets, dtype=torch.int64)


def offsets_of(splits: Tensor, divisors: list[int], strides: list[int], check: bool = False) -> Tensor:
    """split_offsets, or the same by torch where there is no kernel."""
    if has_kernels(splits.device.type):
        return split_offsets(splits, divisors, strides, check)
    rules = zip(divisors, strides, strict=True)
    units = [(-(-splits.long() // by) if by else torch.ones_like(splits)) for by in divisors]
    sums = [torch.cumsum(u, 0, dtype=torch.int64) * stride for u, (_, stride) in zip(units, rules, strict=True)]
    return torch.nn.functional.pad(torch.stack(sums), (1, 0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Splits:
    """Which rows of a matrix belong to each expert: its first ones to the first, and so on."""

    rows: int
    """Of the matrix."""
    count: int
    """Of experts."""
    sizes: tuple[int, ...] | None
    """None where only the device knows them."""
    device_sizes: Tensor | None = None

    @classmethod
    def of(cls, splits: "Sequence[int] | Tensor | Splits", rows: int, *, experts: int | None = None) -> "Splits":
        """From a list or a tensor of integers; one that is on a device is not waited for.

        UserError for anything else, for another number of splits than `experts`, and for values that the host knows and
        that are negative, or do not add up to `rows`.
        """
        made = splits if isinstance(splits, Splits) else cls._of(splits, rows)
        if experts is not None and made.count != experts:
            raise UserError(f"m_splits has {made.count} entries for {experts} experts")
        if made.rows != rows:
            raise UserError(f"m_splits is of {made.rows} rows, and the matrix has {rows}")
        if made is not splits and made.sizes is not None:
            made._check(made.sizes)
        return made

    @classmethod
    def _of(cls, splits: Sequence[int] | Tensor, rows: int) -> "Splits":
        if isinstance(splits, Tensor):
            if splits.dtype not in INTEGERS or splits.dim() != 1:
                got = f"{splits.dtype} {tuple(splits.shape)}"
                raise UserError(f"m_splits is {got}; it takes int32 or int64 with one axis")
            if splits.device.type != "cpu":
                return cls(rows=rows, count=len(splits), sizes=None, device_sizes=splits)
            splits = splits.tolist()
        try:
            sizes = tuple(map(operator.index, splits))
        except TypeError:
            raise UserError(
                f"m_splits is {splits!r}; it takes a list, or an int32 or int64 tensor, of the rows of each expert"
            ) from None
        return cls(rows=rows, count=len(sizes), sizes=sizes)

    @classmethod
    def uniform(cls, count: int, size: int) -> "Splits":
        """The same number of rows for each expert."""
        return cls(rows=count * size, count=count, sizes=(size,) * count)

    def _check(self, sizes: Sequence[int]) -> None:
        negative = [f"{size} for expert {e}" for e, size in enumerate(sizes) if size < 0]
        if negative:
            raise UserError(f"m_splits has {', '.join(negative)}; numbers of rows are not negative")
        if sum(sizes) != self.rows:
            raise UserError(f"m_splits adds up to {sum(sizes)} rows, and the matrix has {self.rows}")

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The sizes; waits for the device where only that knows them."""
        if self.sizes is not None:
            return self.sizes
        sizes = tuple(self.device_sizes.tolist())
        self._check(sizes)
        return sizes

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, end) of each expert; waits as `host` does."""
        return list(pairwise(accumulate(self.host, initial=0)))

    @cached_property
    def equal(self) -> int:
        """The rows of each expert where the host knows that all have equally many; otherwise, and without rows, 0."""
        sizes = self.sizes
        return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else 0

    def padded(self, multiple: int) -> "Splits":
        """Every size rounded up to a multiple; self where that changes none. Waits as `host` does, but not for 1."""
        if multiple == 1 or self.divisor % multiple == 0:
            return self
        sizes = tuple(-(-size // multiple) * multiple for size in self.host)
        return Splits(rows=sum(sizes), count=self.count, sizes=sizes)

    def on(self, device: torch.device) -> Tensor:
        """The sizes as an int64 tensor there; nothing waits. Made once."""
        return self._once("_sizes", device, self._make_sizes)

    def _make_sizes(self, device: torch.device) -> Tensor:
        if self.device_sizes is not None:
            return self.device_sizes.to(device, torch.int64)
        sizes = torch.tensor(self.sizes, dtype=torch.int64)
        return sizes if device.type == "cpu" else sizes.pin_memory().to(device, non_blocking=True)

    def spread(self, values: Tensor) -> Tensor:
        """values [E, ...] -> [rows, ...]: for every row that of its expert, on their device; nothing waits."""
        sizes = self.equal or self.on(values.device)
        return values.repeat_interleave(sizes, dim=0, output_size=self.rows)

    def offsets(self, device: torch.device) -> Tensor:
        """splits_to_offsets of the sizes, int64 [E + 1] on a device; nothing waits. Made once."""
        return self._once("_offsets", device, self._make_offsets)

    def ends(self, device: torch.device) -> Tensor:
        """The offsets but the first, int32 [E], as torch._grouped_mm takes them. Made once."""
        return self._once("_ends", device, lambda device: self.offsets(device)[1:].int())

    def _make_offsets(self, device: torch.device) -> Tensor:
        if self.sizes is None:
            return splits_to_offsets(self.on(device))
        made = torch.tensor(list(accumulate(self.sizes, initial=0)), dtype=torch.int64)
        return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)

    def _once(self, name: str, device: torch.device, make: Callable[[torch.device], Tensor]) -> Tensor:
        kept = self.__dict__.setdefault(name, {})
        found = kept.get(device)
        if found is None:
            found = make(device)
            # Sizes of the host may outlive a CUDA graph, or a trace, that would have to fill in what is kept.
            captured = self.sizes is not None and found.is_cuda and torch.cuda.is_current_stream_capturing()
            if type(found) is Tensor and not captured:
                kept[device] = found
        return found

    def layout(self, width: int, *, columnwise: bool) -> "GroupLayout":
        """Of the members of a matrix [rows, width]. Made once."""
        kept = self.__dict__.setdefault("_layouts", {})
        if (width, columnwise) not in kept:
            kept[width, columnwise] = GroupLayout(splits=self, width=width, columnwise=columnwise)
        return kept[width, columnwise]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def divisor(self) -> int:
        """The largest number that divides every size, 0 where all are 0; waits as `host` does."""
        return math.gcd(*self.host)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupLayout(MemberLayout):
    """That of members of one width: expert e has the rows splits.spans[e] of a matrix [rows, width]."""

    splits: Splits
    width: int
    columnwise: bool
    """Members encode the transpose [width, m_e] of their rows [m_e, width]."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the members; waits as Splits.host does."""
        return [(self.width, m) if self.columnwise else (m, self.width) for m in self.splits.host]

    @property
    def one_shape(self) -> tuple[int, int]:
        """Of all members; UserError, naming one that has another. Waits as Splits.host does."""
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
class GroupedExact:
    """What gemm=exact multiplies: the ExactOperand of every expert, packed."""

    layout: MemberLayout
    matrix: Tensor
    """Flat, the members' matrices one after the other."""
    by_rows: bool
    """Columnwise members lie there as [m_e, width], and are read transposed."""
    factor: Tensor | None
    """float32, flat: one entry for each expert or, with per_row, for each row of each member."""
    per_row: bool
    divisor: float

    @cached_property
    def members(self) -> list[ExactOperand]:
        """One for each expert, as views; waits as Splits.host does."""
        shapes = self.layout.shapes
        matrices = self.layout.views(self.matrix, shapes, by_rows=self.by_rows)
        factors: Sequence[Tensor | None] = [None] * len(matrices)
        if self.factor is not None:
            tall = [(rows if self.per_row else 1, 1) for rows, _ in shapes]
            factors = self.layout.views(self.factor, tall)
        return [ExactOperand(m, f, self.divisor) for m, f in zip(matrices, factors, strict=True)]

    def stacked(self) -> Tensor:
        """[E, r, c] of members that all have the shape [r, c], as a view; waits as `members` does."""
        count, (r, c) = self.layout.splits.count, self.layout.one_shape
        return self.matrix.view(count, c, r).mT if self.by_rows else self.matrix.view(count, r, c)

    def stacked_turned(self) -> Tensor:
        """stacked().mT, [E, c, r]."""
        count, (r, c) = self.layout.splits.count, self.layout.one_shape
        return self.matrix.view(count, c, r) if self.by_rows else self.matrix.view(count, r, c).mT

    def rows(self) -> Tensor:
        """[rows, width]: what the members of a columnwise group are, transposed, one below the other."""
        if self.by_rows or not self.layout.columnwise:
            return self.matrix.view(self.layout.splits.rows, self.layout.width)
        return torch.cat([member.matrix.t() for member in self.members])
