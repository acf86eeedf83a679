"""adapt_megatron: Megatron-Core's distributed optimizer writes held weights as one process does, to the byte."""

import sys

import pytest
import torch
from support.parallel import megatron_gpt, megatron_ranks
from support.ranks import run_ranks

from hqsweep.compat.megatron import adapt_megatron
from hqsweep.errors import UserError


@pytest.fixture(scope="module")
def every():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    return run_ranks(megatron_ranks.RANKS, megatron_gpt.everything)


@pytest.mark.feature("F132")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", megatron_ranks.RECIPES)
def test_fragments_are_the_weights_of_one_process(recipe, every):
    expected = megatron_ranks.in_one_process(recipe)
    for of_rank in every:
        for step, (own, whole) in enumerate(zip(of_rank[recipe], expected, strict=True), 1):
            assert [name for name in whole if not torch.equal(own[name], whole[name])] == [], step
            assert own["in buffer"] == [recipe in megatron_ranks.BY_CODES] * 2
    assert all(not torch.equal(expected[0][name], expected[-1][name]) for name in expected[0] if "_q" in name)


@pytest.mark.feature("F132")
@pytest.mark.slow
def test_a_buffer_of_values_for_held_weights_is_refused(every):
    said = {of_rank["refused"] for of_rank in every}
    assert said == {
        "adapt_megatron: reuse_grad_buf_for_mxfp8_param_ag is for TransformerEngine's MXFP8 weights; leave it out for"
        " weights that are held in mxfp8"
    }


@pytest.mark.feature("F132")
@pytest.mark.slow
def test_megatrons_own_gpt_trains_as_in_one_process(every):
    """20 steps over two ranks, quantized and plain: losses and bytes of one process, and the loss falls alike."""
    ends, (_, alone) = {}, every[0]["gpt"]
    for recipe in megatron_gpt.RECIPES:
        for rank, of_rank in enumerate(every):
            (losses, weights), (expected, whole) = of_rank["gpt"][0][recipe], alone[recipe]
            assert torch.equal(torch.stack(losses), torch.stack([of_step[rank] for of_step in expected])), recipe
            assert [name for name in whole if not torch.equal(weights[name], whole[name])] == [], recipe
        means = torch.stack([torch.stack(of_rank["gpt"][0][recipe][0]) for of_rank in every]).mean(0)
        assert len(means) == 20 and means[-1] < 0.7 * means[0], recipe
        ends[recipe] = means[-1]
    plain = ends.pop(megatron_gpt.PLAIN)
    assert all(0 < (end - plain).abs() < 0.05 * plain for end in ends.values())


def test_without_megatron_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"adapt_megatron: .*; install megatron-core"):
        adapt_megatron()
