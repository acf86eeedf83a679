"""Memory of GPUs that the ranks of a group, on one machine, write to directly: torch's symmetric memory."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hqsweep.torch_private import symmetric_memory

SWITCH = "HQSWEEP_PEER_COPIES"
"""The environment variable by which there is none where it is 0 for some rank."""
BOOT = Path("/proc/sys/kernel/random/boot_id")

_ARE_NEIGHBOURS: dict[tuple[str, int], bool] = {}
"""Whether the ranks of a group, by its name, have GPUs of their own on one machine; the second key is this rank's."""


def shared_memory(group: ProcessGroup, device: torch.device, size: int) -> Any:
    """torch's handle of `size` bytes that every rank of the group has on its device, for all of them; None, on all
    ranks, where some cannot. It waits for the device, and for the others, so not while a graph is captured."""
    key = (group.group_name, device.index)
    if key not in _ARE_NEIGHBOURS:
        _ARE_NEIGHBOURS[key] = all_say(_place(device), group, are_neighbours)
    if not _ARE_NEIGHBOURS[key]:
        return None
    torch.cuda.synchronize(device)
    try:
        handle = symmetric_memory(size, group.group_name, device)
    except Exception:  # of drivers, and of torch where it is built without such memory
        handle = None
    return handle if all_say(handle is not None, group, all) else None


def _place(device: torch.device) -> tuple[str, str]:
    """The machine and the GPU of this rank; for a rank that was told to share no memory a machine of its own. Machines
    may share a name, and containers of one machine a boot."""
    machine = f"{socket.gethostname()} {BOOT.read_text()}" if BOOT.exists() else socket.gethostname()
    own = f"{dist.get_rank()}" if os.environ.get(SWITCH) == "0" else machine
    return own, str(torch.cuda.get_device_properties(device).uuid)


def all_say(word: object, group: ProcessGroup, agree: Callable[[list], bool]) -> bool:
    """What agree() says of the words of all ranks, on each."""
    words: list = [None] * group.size()
    dist.all_gather_object(words, word, group=group)
    return agree(words)


def are_neighbours(places: list[tuple[str, str]]) -> bool:
    """Whether all are on one machine, each on a GPU of its own."""
    return len({host for host, _ in places}) == 1 and len({gpu for _, gpu in places}) == len(places)
