"""Experts spread over ranks are those of one process with the tokens of all, to the byte."""

import pytest
import torch
from support.parallel.expert_ranks import CODES, EQUAL, HELD, RECIPES, ROOMY, TOKENS, WORLD, mixture, run, tokens, train
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]


@pytest.fixture(scope="module")
def spread():
    return run_ranks(WORLD, run)


def assert_same(parts, whole, counts=TOKENS):
    """parts: of each rank; whole: of one process with the tokens of all."""
    for name, expected in whole.items():
        if name[:1] == "y" or name[:2] == "dx":
            of_ranks = expected.split(counts)
            assert all(torch.equal(part[name], own) for part, own in zip(parts, of_ranks, strict=True)), name
        elif name[:2] == "d ":
            assert torch.equal(torch.cat([part[name] for part in parts]), expected / len(parts)), name
        else:
            (held,) = (part[name] for part in parts if name in part)
            assert torch.equal(held, expected), name
    assert sum(len(part) for part in parts) > len(whole)


@pytest.mark.feature("F79")
@pytest.mark.parametrize("name", [*RECIPES, "held"])
def test_experts_over_ranks_are_those_of_one_process(spread, name):
    module = mixture(HELD, held=True) if name == "held" else mixture(RECIPES[name])
    whole = train(module, list(range(WORLD)))
    assert_same([part[name] for part in spread], whole)
    if name == "delayed":
        assert any(".states." in key for key in whole)


@pytest.mark.feature("H15")
@pytest.mark.parametrize("name", ROOMY)
def test_rows_that_have_room_are_those_that_are_waited_for(spread, name):
    whole = train(mixture(RECIPES[name]), list(range(WORLD)), counts=EQUAL)
    assert_same([part["room"][name] for part in spread], whole, EQUAL)


@pytest.mark.feature("H15")
def test_rows_without_room_are_said(spread):
    """The greatest number of rows of a rank's experts, worked out by the router of one process."""
    module = mixture("mxfp8")
    x = torch.cat([tokens(rank, 1, EQUAL)[0] for rank in range(WORLD)])
    most = module(x)[2].view(WORLD, -1).sum(dim=1).max().item() / (2 * EQUAL[0])
    few = f"here: expert_room: 1 left no room for the rows of a rank's experts, {most:.4g} times those of experts"
    unlike = "expert_room: the ranks' numbers of tokens differ, which takes null, for which the host waits"
    for is_nan, of_few, of_unlike in (part["no room"] for part in spread):
        assert is_nan and of_few.startswith(few) and of_unlike == unlike


@pytest.mark.feature("F79")
def test_groups_that_hold_the_same_experts_share_amaxes(spread):
    """Two groups of two have the outputs and the histories of one process, as no scale is of their tokens alone."""
    whole = train(mixture(RECIPES["delayed"]), list(range(WORLD)))
    parts = [part["pairs"] for part in spread]
    assert parts[0].keys() == parts[2].keys() != parts[1].keys()
    forward = {name: tensor for name, tensor in whole.items() if name[:2] != "d "}
    for half in (parts[0] | parts[1], parts[2] | parts[3]):
        states = {name: tensor for name, tensor in half.items() if ".states." in name}
        assert all(torch.equal(states[name], forward[name]) for name in forward if ".states." in name)
    for name in ("y1", "y2", "dx1", "dx2"):
        assert torch.equal(torch.cat([part[name] for part in parts]), forward[name])


@pytest.mark.feature("H16")
@pytest.mark.parametrize("name, recipe, held", [("cut", CODES, False), ("held and cut", HELD, True)])
def test_experts_of_a_rank_are_cut_further_by_fully_shard(spread, name, recipe, held):
    """Two groups of two, whose gradients are the sums of those of two processes with the tokens of a group each."""
    halves = [train(mixture(recipe, held), [first, first + 1], first) for first in (0, 2)]
    parts = [part[name] for part in spread]
    for key in halves[0]:
        if key[:2] == "d ":
            assert all(torch.equal(part[key], halves[0][key] + halves[1][key]) for part in parts), key
        else:
            assert torch.equal(torch.cat([part[key] for part in parts]), torch.cat([half[key] for half in halves])), key


@pytest.mark.feature("H14")
def test_codes_travel_where_nothing_else_is_read(spread):
    """Bytes of a row: tokens there, outputs back, their gradients there, gradients of tokens back. Codes and scales of
    32 elements: nvfp4 16 + 2, mxfp8 32 + 1, fp8_current 32, fp8_block 32 + 4, all filled up to 16."""
    sent = spread[0]["bytes"]
    assert sent["high"] == [64, 64, 64, 64]
    assert sent["codes"] == [32, 64, 48, 64]
    assert sent["per tensor"] == [32, 64, 48, 64]


@pytest.mark.feature("H14")
def test_an_evaluation_sends_codes_of_any_source(spread):
    x = torch.cat([tokens(rank, 1)[0] for rank in range(WORLD)])
    with torch.no_grad():
        y = mixture("mxfp8")(x)[0]
    assert torch.equal(torch.cat([part["evaluated"]["y"] for part in spread]), y)
    assert spread[0]["evaluated"]["bytes"] == [48, 64]


def test_what_cannot_be_spread_is_refused(spread):
    twice, axes, none, odd = spread[0]["refused"]
    assert twice == "m: its experts are spread over ranks already"
    assert axes == "expert_parallel: the mesh has axes ('dp', 'tp'); it takes one that is named 'ep', or one axis"
    assert none == "expert_parallel: Linear has no LayerNormMoE, and so no experts to spread"
    assert odd == "m: 6 experts over 4 ranks; ep takes a number that divides the experts"
