"""A layer whose tokens are spread over ranks computes what one process does, but for the order of sums."""

import pytest
import torch
from support.parallel.context_ranks import CASES, LENGTH, WORLD, layer, run, train
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def spread():
    return run_ranks(WORLD, run)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_over_all_tokens(spread, name):
    """In float32 to its precision; in mxfp8 a last bit may turn a code, of 3 bits after the point."""
    whole, bound = train(layer(name), slice(0, LENGTH)), 0.02 if name == "mxfp8" else 1e-5
    for key, expected in whole.items():
        own = [part[name][key] for part in spread]
        got = torch.cat(own, dim=1) if key in ("x", "y") else own[0]
        assert (got - expected).norm() <= bound * expected.norm(), key


def test_what_cannot_be_spread_is_refused(spread):
    low, rounded, none = spread[0]["refused"]
    assert low == (
        "layer.attn.dpa: tokens are spread over ranks, and attention in low precision reads whole sequences; give"
        " recipe.dpa high precision"
    )
    assert rounded == ("layer.attn.dpa: quantize_boundaries rounds gradients that are then summed over ranks; drop it")
    assert none == "context_parallel: Linear has no MultiheadAttention"
