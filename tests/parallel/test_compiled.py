"""torch.compile of layers of which ranks share the matrices."""

import compiled_ranks
import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


@pytest.mark.slow
def test_a_compiled_step_has_the_bits_of_an_eager_one():
    assert run_ranks(2, compiled_ranks.differences, "mxfp8") == [[], []]
