"""A GPT in stages on two ranks gives the losses and gradients of one process with as many microbatches, to the byte."""

import pytest
import torch
from support.parallel.pipeline_ranks import CASES, LAYERS, STEPS, WORLD, in_one_process, run
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]
LINEARS = 4
"""Linears of a layer."""


@pytest.fixture(scope="module")
def staged():
    return run_ranks(WORLD, run)


@pytest.mark.feature("H22")
@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_one_process_does(staged, name):
    whole, parts = in_one_process(name), [rank[name] for rank in staged]
    for key, expected in whole.items():
        if key != "weights":
            own = [part[key] for part in parts if key in part]
            both = ("loss", "evaluated", "d embedding") if name == "tied" else ("loss", "evaluated")
            assert len(own) == (2 if key.startswith(both) else 1), key
            assert all(torch.equal(tensor, expected) for tensor in own), key
    assert any(".states." in key for key in whole) == (name == "delayed")


@pytest.mark.feature("H22")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "stochastic weights"])
def test_weights_are_quantized_once_a_step(staged, name):
    """Both directions at once, for the microbatches of all of its stages."""
    for rank in staged:
        assert rank[name]["weights"].tolist() == [STEPS] * (LINEARS * LAYERS // WORLD)


@pytest.mark.feature("H22")
def test_what_cannot_be_staged_is_refused(staged):
    other, shallow, few, odd, batch, layer, tokens = staged[0]["refused"]
    assert other == "Pipeline: Linear has no embedding; it takes hqsweep's own GPT"
    assert shallow == "Pipeline: 4 stages of 3 layers; lower pp, or stages_per_rank"
    assert few == "Pipeline: 1 microbatches over 2 ranks; it takes 2 or more"
    assert odd == "Pipeline: 3 microbatches over 2 ranks; it takes a multiple of 2"
    assert layer == "this layer refuses"
    assert tokens == "Pipeline: a sequence of 31 tokens does not divide by tp=2"
    assert batch == "Pipeline: a batch of 3 sequences for 2 microbatches"
