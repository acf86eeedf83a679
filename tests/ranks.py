"""run_ranks: a function on each of several ranks, of gloo or of NCCL, and what each returns."""

import pytest
import torch
import torch.distributed as dist

from hqsweep.dist.spawn import spawn_ranks as run_ranks

__all__ = ["BACKENDS", "rank_device", "run_ranks"]

BACKENDS = ("gloo", pytest.param("nccl", marks=pytest.mark.gpu2))
"""To parametrize a test of two ranks with: its gloo form, and the same on two GPUs."""


def rank_device() -> torch.device:
    """Where the tensors of this rank are."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")
