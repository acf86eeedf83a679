"""Splits padded on the device: every member gets whole blocks of rows, and nothing waits.

Only the device knows how many rows that takes. So the matrix has as many rows as any splits could need. Rows after the
last member are unused, and kernels skip them.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hqsweep.memo import cached_property
from hqsweep.ops.members.splits import Splits, offsets_of


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
