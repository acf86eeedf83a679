"""run_ranks: a function on each of several ranks, of gloo or of NCCL, and what each returns."""

import os

import pytest
import torch
import torch.distributed as dist

from hqsweep.parallel import mesh
from hqsweep.parallel.wire.spawn import spawn_ranks as run_ranks

__all__ = ["BACKENDS", "DEVICE", "backend", "rank_device", "run_ranks"]

DEVICE = "HQSWEEP_TEST_DEVICE"
"""The environment variable with the device of trainings in tests, of ranks and of one process."""

BACKENDS = ("gloo", pytest.param("nccl", marks=pytest.mark.gpu2))
"""To parametrize a test of two ranks with: its gloo form, and the same by NCCL, on two GPUs or on one that both
share."""


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    """The libraries of the collectives of trainings, which are on the CPU or, with NCCL, on GPUs."""
    os.environ[DEVICE] = "cuda" if request.param == "nccl" else "cpu"
    yield mesh.backend(os.environ[DEVICE])
    del os.environ[DEVICE]


def rank_device() -> torch.device:
    """Where the tensors of this rank are."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
