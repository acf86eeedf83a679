"""Errors of runs in one line; the messages are those of torch 2.13 and numpy 2."""

import numpy as np
import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.engine.reasons import reason_of

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 139.81 GiB of which 5.06 GiB is"
    " free. Including non-PyTorch memory, this process has 134.74 GiB memory in use."
)


def raised(call):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        call()
    return reason_of(caught.value)


def test_memory_of_a_gpu_says_what_was_asked_and_what_was_free():
    said = reason_of(torch.OutOfMemoryError(CUDA))
    assert said.startswith("out of memory: 20.00 GiB were asked of GPU 1, where 5.06 GiB of 139.81 GiB were free; give")
    assert "engine.runs_per_gpu" in said
    assert reason_of(torch.OutOfMemoryError("no words")).startswith("out of GPU memory: no words; give fewer")


def test_memory_of_the_cpu_says_what_was_asked():
    assert raised(lambda: torch.empty(2**60, dtype=torch.uint8)).startswith(
        "out of memory: 1073741824.0 GiB were asked"
    )
    assert raised(lambda: np.empty(2**60, dtype=np.uint8)).startswith("out of memory: 1.00 EiB were asked for at once")
    assert reason_of(MemoryError()).startswith("out of memory; give fewer engine.workers")


def test_divergence_says_what_to_change():
    said = reason_of(Diverged(37, float("nan"), 0.01))
    assert said.startswith("loss is nan at step 37; a repeat would say the same: lower train.lr (0.01)")


def test_other_errors_are_told_with_their_type_unless_they_are_meant_for_people():
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(UserError("data.path:\n none there")) == "data.path: none there"
