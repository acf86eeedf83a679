"""Settings that a run makes for its whole process, and their restoration.

After a run the next one in the same process has the same bits, warnings and memory as in a process of its own.
"""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda
from torch.utils import deterministic


@contextmanager
def isolated() -> Iterator[None]:
    """The context of a run: afterwards the environment, torch's settings and warning filters are restored.

    Warnings that were given can be given again, and the system seeds torch's generators, as in a new process.
    Graphs of torch.compile are dropped, unreachable objects are collected, and CUDA's cached memory returns to the
    device.
    """
    environment, switches = dict(os.environ), _switches()
    gc.freeze()  # modules such as torch take a third of a second to search
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    _switch(*switches)
    torch.seed()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.unfreeze()
    torch.cuda.empty_cache()


def make_deterministic() -> None:
    """Make runs on a GPU repeat bit for bit, or raise, by deterministic kernels and no cuDNN attention.

    On CPU the kernels used here repeat anyway, and the setting would cost two seconds of imports.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # no code here reads memory before it is written


def _switches() -> tuple[bool, bool, bool]:
    """The settings that jobs change: deterministic algorithms, filling of new memory, attention of cuDNN."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,
        cuda.cudnn_sdp_enabled(),
    )


def _switch(algorithms: bool, fill: bool, cudnn_attention: bool) -> None:
    if torch.are_deterministic_algorithms_enabled() != algorithms:  # setting it takes two seconds of imports
        torch.use_deterministic_algorithms(algorithms)
    deterministic.fill_uninitialized_memory = fill
    cuda.enable_cudnn_sdp(cudnn_attention)
