"""Mailboxes by which kernels of all ranks of a group, running at the same time, exchange the parts of a loss."""

from typing import Any

import torch
from torch.distributed import ProcessGroup

from hqsweep.ops.model.loss import MOST_RANKS, NUMBERS, Boxes
from hqsweep.parallel.wire.shared_memory import all_say, shared_memory

HALVES = 2
"""Launches alternate between the halves, since a rank may be one launch behind."""
PART_BYTES = 4 * NUMBERS

_MEETINGS: dict[tuple[str, int], Boxes | None] = {}
"""(name of a group, device) -> the boxes of the group; None if the ranks found that they cannot have any."""
_MEMORY: list[Any] = []
"""The memory of all boxes. Replaced boxes stay, since graphs may still use them."""


def meeting(group: ProcessGroup, device: torch.device, rows: int) -> Boxes | None:
    """Return the group's boxes for kernels of up to `rows` rows.

    None, on all ranks, on a CPU, over machines, and for more rows than before while a graph is captured. All ranks call
    it with the same arguments, and launch the same kernels in the same order.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or not 1 < group.size() <= MOST_RANKS:
        return None
    key = (group.group_name, device.index)
    found = _MEETINGS.get(key)
    if (found is None and key in _MEETINGS) or (found is not None and found.rows >= rows):
        return found
    if torch.cuda.is_current_stream_capturing():
        return None
    _MEETINGS[key] = _new(group, device, 1 << (rows - 1).bit_length())
    return _MEETINGS[key]


def _new(group: ProcessGroup, device: torch.device, rows: int) -> Boxes | None:
    if not all_say(torch.cuda.get_device_name(device), group, lambda names: len(set(names)) == 1):
        return None  # a kernel that one GPU cannot launch would be waited for
    size = HALVES * group.size() * rows * PART_BYTES
    memory = shared_memory(group, device, size)
    if memory is None:
        return None
    memory.get_buffer(group.rank(), (size,), torch.uint8).fill_(0xFF)  # no part has come
    state = torch.zeros(3, dtype=torch.uint32, device=device)
    memory.barrier()
    _MEMORY.append(memory)
    return Boxes(memory.buffer_ptrs_dev, state, rows, group.size(), group.rank())
