"""Tests marked `gpu`, and those of ranks that exchange by NCCL, `gpu2`, skip where there is no CUDA device.
HQSWEEP_EXTENSION=FILE tests another build of the kernels."""

import os

import pytest
import torch
from support.fuzz import extension_file

from hqsweep.jobs.isolation import make_deterministic

if "HQSWEEP_EXTENSION" in os.environ:
    extension_file.use(os.environ["HQSWEEP_EXTENSION"])

os.environ.pop("COLUMNS", None)  # of pytest-xdist's workers; a command's output has the width of its tables


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if any(item.get_closest_marker(marker) for marker in ("gpu", "gpu2")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def deterministic():
    """On CUDA: as training runs, so that bytes of two runs can be compared."""
    if not torch.cuda.is_available():
        yield
        return
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
