"""The switches that a run turns for its whole process, and their way back: after it what it has changed is restored and
its memory is freed, so that the next run in the same process has the bits, the warnings and the memory of one in a
process of its own.
"""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda
from torch.utils import deterministic


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the environment, torch's switches and the filters of warnings, and let a warning that was given be given
    again. torch's generators are seeded by the system, as in a new process; unreachable objects are collected, and
    CUDA's cached memory goes back to the device."""
    environment, switches = dict(os.environ), _switches()
    gc.freeze()  # what is there already, torch above all, takes a third of a second to look through
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    _switch(*switches)
    torch.seed()
    gc.collect()
    gc.unfreeze()
    torch.cuda.empty_cache()


def make_deterministic() -> None:
    """Have runs on a GPU repeat bit for bit, or raise: deterministic kernels only, and no cuDNN attention.

    On CPU the kernels used here repeat anyway, and the switch would cost two seconds of imports.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # nothing here reads what it did not write


def _switches() -> tuple[bool, bool, bool]:
    """The switches that jobs turn: deterministic algorithms, filling of new memory, attention of cuDNN."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,
        cuda.cudnn_sdp_enabled(),
    )


def _switch(algorithms: bool, fill: bool, cudnn_attention: bool) -> None:
    if torch.are_deterministic_algorithms_enabled() != algorithms:  # to say it again takes two seconds of imports
        torch.use_deterministic_algorithms(algorithms)
    deterministic.fill_uninitialized_memory = fill
    cuda.enable_cudnn_sdp(cudnn_attention)
