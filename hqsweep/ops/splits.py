"""Splits: the rows of a matrix that belong to each member, and where they begin; PaddedSplits, with whole blocks of
rows.

PaddedSplits are computed on the device, and nothing waits. Only the device knows how many rows they take. So the matrix
has as many rows as any splits could need. Rows after the last member are unused, and kernels skip them.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.memo import cached_property
from hqsweep.ops import library
from hqsweep.ops.library import described, extension, has_kernels

T = TypeVar("T")
INT64_MAX = 2**63 - 1
INTEGERS = (torch.int64, torch.int32)


def splits_to_offsets(splits: Sequence[int] | Tensor, stride: int = 1, *, check: bool = False) -> Tensor:
    """Return int64 [E + 1] on the sizes' device: 0, then stride times the running sum of the sizes [E].

    Sizes may be negative. UserError for values outside int64: always on the CPU; on a GPU only with `check`, which
    waits for it. Without, values wrap. One launch.
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


@library.operator(
    "split_offsets(Tensor splits, int[] divisors, int[] strides, bool check=False) -> Tensor",
    fake=lambda splits, divisors, strides, check=False: splits.new_empty(
        (len(divisors), splits.numel() + 1), dtype=torch.int64
    ),
)
def split_offsets(splits: Tensor, divisors: list[int], strides: list[int], check: bool = False) -> Tensor:
    """Return int64 [rules, n + 1] in one launch. splits: int32 or int64 [n]. At most 8 rules.

    Row r is 0, then strides[r] times the running sum of ceil(splits / divisors[r]). Divisor 0 counts 1 for every split.
    OverflowError for an offset outside int64: always on the CPU; on a GPU only with `check`, which waits. Without,
    values wrap.
    """
    if splits.dtype not in INTEGERS or splits.dim() != 1:
        raise ValueError(f"splits are {described(splits)}; they take int32 or int64 with one axis")
    splits, wide = splits.contiguous(), splits.dtype == torch.int64
    out = splits.new_empty((len(divisors), splits.numel() + 1), dtype=torch.int64)
    call = (splits.data_ptr(), wide, splits.numel(), divisors, strides, out.data_ptr())
    if not splits.is_cuda:
        extension().offsets_cpu(*call)
        return out
    overflow = splits.new_zeros(1, dtype=torch.int32) if check else None
    extension().offsets_cuda(*call, 0 if overflow is None else overflow.data_ptr(), *library.where(splits))
    if check and overflow.item():
        raise OverflowError("an offset does not fit in 64 bits")
    return out


def offsets_of(splits: Tensor, divisors: list[int], strides: list[int], check: bool = False) -> Tensor:
    """Return split_offsets(), computed by torch if there is no kernel."""
    if has_kernels(splits.device.type):
        return split_offsets(splits, divisors, strides, check)
    rules = zip(divisors, strides, strict=True)
    units = [(-(-splits.long() // by) if by else torch.ones_like(splits)) for by in divisors]
    sums = [torch.cumsum(u, 0, dtype=torch.int64) * stride for u, (_, stride) in zip(units, rules, strict=True)]
    return torch.nn.functional.pad(torch.stack(sums), (1, 0))


def _sent(numbers: Iterable[int], device: torch.device) -> Tensor:
    """Return the numbers as an int64 tensor on a device; nothing waits."""
    if device.type == "cpu" or torch.compiler.is_compiling():  # a trace treats them as constants
        return torch.tensor(list(numbers), dtype=torch.int64, device=device)
    return torch.tensor(list(numbers), dtype=torch.int64).pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Splits:
    """The rows of a matrix that belong to each member (expert): consecutive rows, in member order."""

    rows: int
    """Rows of the matrix."""
    count: int
    """Number of members."""
    sizes: tuple[int, ...] | None
    """The rows of each member; None if only the device knows them."""
    device_sizes: Tensor | None = None
    for_plans: bool = True
    """Whether products may use an algorithm that takes the sizes from the host."""

    @classmethod
    def of(cls, splits: "Sequence[int] | Tensor | Splits", rows: int, *, experts: int | None = None) -> "Splits":
        """Return the Splits of a list or an integer tensor, without waiting for a device tensor.

        UserError for anything else, and if there are not `experts` splits. Host values must not be negative and add up
        to `rows`.
        """
        result = splits if isinstance(splits, Splits) else cls._of(splits, rows)
        if experts is not None and result.count != experts:
            raise UserError(f"m_splits has {result.count} entries for {experts} experts")
        if result.rows != rows:
            raise UserError(f"m_splits is of {result.rows} rows, and the matrix has {rows}")
        if result is not splits and result.sizes is not None:
            result._check(result.sizes)
        return result

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
        """Return splits with equally many rows for each member."""
        return cls(rows=count * size, count=count, sizes=(size,) * count)

    def _check(self, sizes: Sequence[int]) -> None:
        negative = [f"{size} for expert {e}" for e, size in enumerate(sizes) if size < 0]
        if negative:
            raise UserError(f"m_splits has {', '.join(negative)}; numbers of rows are not negative")
        if sum(sizes) != self.rows:
            raise UserError(f"m_splits adds up to {sum(sizes)} rows, and the matrix has {self.rows}")

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The sizes; waits for the device if only it knows them.

        RuntimeError during the capture of a CUDA graph, where nothing can wait.
        """
        if self.sizes is not None:
            return self.sizes
        on_gpu = self.device_sizes.is_cuda and not torch.compiler.is_compiling()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product for each expert needs the host to know its rows, and only the GPU does")
        sizes = tuple(self.device_sizes.tolist())
        self._check(sizes)
        return sizes

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, end) of each member; waits as `host` does."""
        return list(pairwise(accumulate(self.host, initial=0)))

    @cached_property
    def equal(self) -> int:
        """The rows per member if the host knows that all are equal; otherwise, and without rows, 0."""
        sizes = self.sizes
        return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else 0

    def padded(self, multiple: int) -> "Splits":
        """Return splits with every size rounded up to a multiple, or self if nothing changes.

        Waits as `host` does, except for multiple 1.
        """
        if multiple == 1 or self.divisor % multiple == 0:
            return self
        sizes = tuple(-(-size // multiple) * multiple for size in self.host)
        return Splits(rows=sum(sizes), count=self.count, sizes=sizes, for_plans=self.for_plans)

    def on(self, device: torch.device) -> Tensor:
        """Return the sizes as an int64 tensor on a device, made once; nothing waits."""
        return self.cached("sizes", self._make_sizes, device)

    def _make_sizes(self, device: torch.device) -> Tensor:
        if self.device_sizes is not None:
            return self.device_sizes.to(device, torch.int64)
        return _sent(self.sizes, device)

    def spread(self, values: Tensor) -> Tensor:
        """Return [rows, ...]: for every row its member's entry of values [E, ...], on their device; nothing waits."""
        sizes = self.equal or self.on(values.device)
        return values.repeat_interleave(sizes, dim=0, output_size=self.rows)

    def offsets(self, device: torch.device) -> Tensor:
        """Return splits_to_offsets of the sizes, int64 [E + 1] on a device, made once; nothing waits."""
        return self.cached("offsets", self._make_offsets, device)

    def ends(self, device: torch.device) -> Tensor:
        """Return the offsets without the first, int32 [E], as torch._grouped_mm takes them. Made once."""
        return self.cached("ends", lambda device: self.offsets(device)[1:].int(), device)

    def _make_offsets(self, device: torch.device) -> Tensor:
        if self.sizes is None:
            return splits_to_offsets(self.on(device))
        return _sent(accumulate(self.sizes, initial=0), device)

    def cached(self, name: str, make: Callable[..., T], *arguments: Hashable) -> T:
        """Return make(*arguments), made once if the result can be kept.

        A trace keeps nothing, since it must not write to objects made outside.
        """
        if torch.compiler.is_compiling():
            return make(*arguments)
        cache = self.__dict__.setdefault("_cache", {})
        result = cache.get((name, *arguments))
        if result is None:
            result = make(*arguments)
            if self._lasts(result.device_sizes if isinstance(result, Splits) else result):
                cache[name, *arguments] = result
        return result

    def _lasts(self, result: object) -> bool:
        """Return whether a result may be kept.

        Tensors of a dispatch mode may not. Nor may tensors made from host sizes while a CUDA graph is captured, since
        only replay fills them.
        """
        if not isinstance(result, Tensor):
            return True
        captured = self.sizes is not None and result.is_cuda and torch.cuda.is_current_stream_capturing()
        return type(result) is Tensor and not captured

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def divisor(self) -> int:
        """The greatest common divisor of all sizes, 0 if all are 0; waits as `host` does."""
        return math.gcd(*self.host)


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedSplits(Splits):
    """`base` with every size rounded up to a multiple. `rows` counts all rows of the matrix, unused ones included."""

    base: Splits
    multiple: int
    starts: Tensor
    """int64 [2, E + 1]: the offsets of base, and the padded offsets."""

    @classmethod
    def over(cls, base: Splits, multiple: int, device: torch.device) -> "PaddedSplits":
        """Return padded splits on a device, for splits whose sizes the host does not know. Made once."""
        return base.cached("padded", partial(cls._over, base), multiple, device)

    @classmethod
    def _over(cls, base: Splits, multiple: int, device: torch.device) -> "PaddedSplits":
        most = base.rows + min(base.count, base.rows) * (multiple - 1)
        starts = offsets_of(base.on(device), [1, multiple], [1, multiple])
        fields = {"rows": most // multiple * multiple, "count": base.count, "sizes": None}
        return cls(**fields, device_sizes=starts[1].diff(), base=base, multiple=multiple, starts=starts)

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The sizes; waits as base.host does, and base.host checks them."""
        return tuple(-(-size // self.multiple) * self.multiple for size in self.base.host)

    @cached_property
    def places(self) -> Tensor:
        """int64 [base.rows]: the padded position of each row of base."""
        moved = self.base.spread(self.starts[1, :-1] - self.starts[0, :-1])
        return moved + torch.arange(self.base.rows, device=moved.device)

    @cached_property
    def _members(self) -> Tensor:
        """int64 [rows]: the member of each row; unused rows count as the last member's."""
        rows = torch.arange(self.rows, device=self.starts.device)
        return torch.bucketize(rows, self.starts[1, 1:], right=True).clamp(max=self.count - 1)

    def spread(self, values: Tensor) -> Tensor:
        return values.index_select(0, self._members)

    def _make_offsets(self, device: torch.device) -> Tensor:
        return self.starts[1].to(device)
