"""GPU memory that the ranks of a group on one machine write to directly, and fast copies of strided tensors.

The memory is torch's symmetric memory. Copies are in units of up to 16 bytes, which is faster than torch's copies
element by element.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.torch_private import symmetric_memory

_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""dtypes whose elements serve as units, the widest first. A copy never looks at the values."""


def in_order(x: Tensor) -> Tensor:
    """x.contiguous(), by a wide copy."""
    return x if x.is_contiguous() else as_words(x)[0].contiguous().view(x.dtype)


def copy_(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), by a wide copy. Both have one dtype and shape."""
    into, values = as_words(target, source)
    into.copy_(values)


def as_words(*tensors: Tensor, most: int = 16) -> list[Tensor]:
    """Views of the tensors, all of one dtype, as the widest units of at most `most` bytes that fit all of them."""
    for word in _WORDS:
        if word.itemsize <= most and all(_consists_of(x, word.itemsize) for x in tensors):
            return [x.view(word) for x in tensors]
    return list(tensors)


def _consists_of(x: Tensor, size: int) -> bool:
    if x.dim() == 0 or x.itemsize >= size or x.stride(-1) != 1 or torch.compiler.is_compiling() or x.is_neg():
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.numel() > 0 and x.data_ptr() % size == 0 and all(step * x.itemsize % size == 0 for step in steps)


SWITCH = "HQSWEEP_PEER_COPIES"
"""The environment variable that forbids such memory where any rank sets it to 0."""
BOOT = Path("/proc/sys/kernel/random/boot_id")

_ARE_NEIGHBOURS: dict[tuple[str, int], bool] = {}
"""(name of a group, this rank's GPU) -> whether its ranks are on one machine, each on its own GPU."""


def shared_memory(group: ProcessGroup, device: torch.device, size: int) -> Any:
    """torch's handle of `size` bytes that every rank of the group allocates and all may write; None, on all ranks,
    where some rank cannot.

    Waits for the device and for the other ranks, so it cannot run while a graph is captured.
    """
    key = (group.group_name, device.index)
    if key not in _ARE_NEIGHBOURS:
        _ARE_NEIGHBOURS[key] = all_say(_place(device), group, are_neighbours)
    if not _ARE_NEIGHBOURS[key]:
        return None
    torch.cuda.synchronize(device)
    try:
        handle = symmetric_memory(size, group.group_name, device)
    except Exception:  # from drivers, or from a torch without such memory
        handle = None
    return handle if all_say(handle is not None, group, all) else None


def _place(device: torch.device) -> tuple[str, str]:
    """The machine and the GPU of this rank. With HQSWEEP_PEER_COPIES=0 the machine is unique to the rank.

    Machines may share a name, and containers of one machine share a boot id, so both count.
    """
    machine = f"{socket.gethostname()} {BOOT.read_text()}" if BOOT.exists() else socket.gethostname()
    own = f"{dist.get_rank()}" if os.environ.get(SWITCH) == "0" else machine
    return own, str(torch.cuda.get_device_properties(device).uuid)


def all_say(word: object, group: ProcessGroup, agree: Callable[[list], bool]) -> bool:
    """The result of agree() on the words of all ranks. A collective."""
    words: list = [None] * group.size()
    dist.all_gather_object(words, word, group=group)
    return agree(words)


def are_neighbours(places: list[tuple[str, str]]) -> bool:
    """Whether all places are on one machine, each on a GPU of its own."""
    return len({host for host, _ in places}) == 1 and len({gpu for _, gpu in places}) == len(places)
