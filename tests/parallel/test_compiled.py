"""torch.compile of layers of which ranks share the matrices."""

import pytest
import torch
from support.parallel import compiled_ranks
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


@pytest.mark.slow
def test_matrices_then_checkpoints_then_compiled_blocks_then_fully_shard():
    """In two steps losses and gradients are those of one process, as they are without any of the four. torch 2.13 ends
    with an error for its own attention there: it saves a DeviceMesh as a tensor."""
    assert run_ranks(4, compiled_ranks.differences, "mxfp8") == [[]] * 4
