"""Where kernels of all ranks of a group, which run at the same time, tell each other numbers of each row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.dist.shared_memory import shared_memory

HALVES = 2
"""Launches take them by turns, since a rank may be a launch behind."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """The boxes of a group: memory of each rank, [2, ranks, rows] of so many bytes, that the others write to."""

    memory: Any
    rows: int
    state: Tensor
    """uint32 [3], of this rank alone, zeros before the first launch."""

    @property
    def boxes(self) -> int:
        """The address, on this rank's device, of the addresses of all ranks' boxes."""
        return self.memory.buffer_ptrs_dev


_MEETINGS: dict[tuple[str, int, int], Meeting | None] = {}
_OUTGROWN: list[Meeting] = []
"""Meetings that graphs may still use, although larger ones have taken their place."""


def meeting(group: ProcessGroup, device: torch.device, rows: int, width: int) -> Meeting | None:
    """The group's boxes for kernels of up to so many rows of `width` bytes. None, on all ranks, where there are none:
    on a CPU, over machines, and for more rows than before while a graph is captured. All ranks come here with the same,
    and launch the same kernels in the same order."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    key = (group.group_name, device.index, width)
    found = _MEETINGS.get(key)
    if (found is None and key in _MEETINGS) or (found is not None and found.rows >= rows):
        return found
    if torch.cuda.is_current_stream_capturing():
        return None
    if found is not None:
        _OUTGROWN.append(found)
    _MEETINGS[key] = _new(group, device, 1 << (rows - 1).bit_length(), width)
    return _MEETINGS[key]


def _new(group: ProcessGroup, device: torch.device, rows: int, width: int) -> Meeting | None:
    size = HALVES * group.size() * rows * width
    memory = shared_memory(group, device, size)
    if memory is None:
        return None
    memory.get_buffer(group.rank(), (size,), torch.uint8).fill_(0xFF)  # no number has come
    state = torch.zeros(3, dtype=torch.uint32, device=device)
    memory.barrier()
    return Meeting(memory, rows, state)
