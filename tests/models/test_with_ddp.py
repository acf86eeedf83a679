"""DistributedDataParallel and FSDP2 of a converted model, on two processes."""

import pytest
import torch
from cases import DELAYED
from support.models.ddp_ranks import DTYPES, RANKS, RECIPES, gradients, model, run
from support.ranks import run_ranks

import hqsweep

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(RANKS, run)


def differences(a, b):
    assert a.keys() == b.keys() and a
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("how", [RECIPES[0], "converted later"])
def test_gradients_are_the_means_of_those_of_each_rank(ranks, how):
    """To the bit, with the random bits of the plain model's names; whether it was wrapped before or afterwards."""
    alone = model()
    conversion = hqsweep.convert(alone, RECIPES[0])
    first, second = (gradients(alone, rank) for rank in range(RANKS))
    means = {name: first[name] / 2 + second[name] / 2 for name in first}
    for seen in ranks:
        assert not differences(means, seen[how]["gradients"])
        assert seen[how]["names"] == [module.name for module in conversion.modules] == ["1", "3"]


def test_ranks_share_the_amaxes_of_delayed_scaling(ranks):
    first, second = (seen[DELAYED]["states"] for seen in ranks)
    assert not differences(first, second)
    apart = []
    for rank in range(RANKS):
        alone = model()
        conversion = hqsweep.convert(alone, DELAYED)
        gradients(alone, rank)
        apart.append(conversion.state_dict())
    largest = {name: torch.maximum(*(states[name] for states in apart)) for name in first}
    assert not differences(largest, first) and differences(*apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_sharded_model_are_these_means(ranks, dtype):
    """To the bit, in the dtype in which FSDP gathers the weights."""
    alone = model()
    hqsweep.convert(alone, RECIPES[0])
    alone.to(dtype or torch.float32)
    first, second = (gradients(alone, rank) for rank in range(RANKS))
    means = {name: first[name].float() / 2 + second[name].float() / 2 for name in first}
    for seen in ranks:
        assert not differences(means, seen[f"sharded {dtype}"]["gradients"])
        assert seen[f"sharded {dtype}"]["unused"] == []
