"""Delayed scaling in a data-parallel training: all ranks have the states of one process that has the whole batch."""

import re

import pytest
import torch
from support.nn.delayed_ranks import RANKS, SHARED, STEPS, Model, run, states, train
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(RANKS, run)


def differences(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_amaxes_are_the_largest_over_the_ranks(ranks):
    """So that states and outputs are those of one process, at every step. The experts see the rows of both ranks in
    another order, which leaves the amax of all of them."""
    whole = Model(SHARED)
    for step in range(1, STEPS + 1):
        train(whole, step)
        expected = {name: tensor for name, tensor in states(whole).items() if name.startswith("linear.")}
        assert not differences(ranks[0][f"states{step}"], ranks[1][f"states{step}"])
        for seen in ranks:
            actual = {name: seen[f"states{step}"][name] for name in expected}
            assert not differences(expected, actual) and len(actual) == 18


def test_a_resumed_training_is_the_uninterrupted_one(ranks):
    """On every rank, from a checkpoint of its own, which is that of every other."""
    for seen in ranks:
        assert torch.equal(seen["resumed"][0], seen["y3"]) and torch.equal(seen["resumed"][1], seen["y4"])


def test_a_group_of_one_rank_keeps_its_own_amaxes(ranks):
    assert differences(ranks[0]["of a group"], ranks[1]["of a group"])


def test_a_format_may_keep_amaxes_of_each_rank(ranks):
    """Which DistributedDataParallel must not overwrite."""
    assert any("input" in name for name in differences(*(seen["local"] for seen in ranks)))
    for seen in ranks:
        assert re.search(r"\+local_amax keeps .* build it with broadcast_buffers=False", seen["overwritten"])
