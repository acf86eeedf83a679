"""GPU memory that the ranks of a group on one machine write to directly: torch's symmetric memory."""

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
