"""The GPU of each rank. Where a machine has fewer GPUs than ranks, ranks share them, which is enough to try a mesh out:
they compute and exchange the same bytes."""

import os
import socket

import torch
import torch.distributed as dist


def take_gpu(local_rank: int) -> torch.device:
    """Make the GPU of a rank the current one, and return it. local_rank: its number among the ranks of this machine,
    from 0; the numbers go round the GPUs that this process sees."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # a DeviceMesh would otherwise make the GPU of LOCAL_RANK the current one
    return device


def stand_apart(index: int) -> None:
    """Have NCCL take the ranks of one GPU, each with an index of its own from 0, for ranks of several machines: it
    refuses two on a GPU of one machine. They exchange tensors by sockets. Call it before NCCL's first collective."""
    if index:
        machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{machine}/{index}"


def ranks_of_gpu(device: torch.device) -> list[int]:
    """The ranks on this rank's GPU, itself included. A collective of all ranks, on their CPUs."""
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    every: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return [rank for rank, gpu in enumerate(every) if gpu == own]
