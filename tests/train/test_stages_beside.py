"""Trainings whose layers are shared out over ranks, and along another axis too, against those along that axis alone."""

import pytest
import torch
from support.parallel.staged_ranks import BREAK, ON_FOUR, RESUMED, assert_same, beside, loaded, train_beside
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def on_two(folder):
    return run_ranks(2, train_beside, folder, 1)


@pytest.fixture(scope="module")
def on_four(folder, on_two):
    return run_ranks(4, train_beside, folder, 2)


@pytest.mark.parametrize("name", ON_FOUR)
def test_stages_beside_other_axes_train_as_those_alone_do(on_two, on_four, name):
    """On four ranks, of which two share out each stage: what they sum is summed in the same order, and so is the
    norm."""
    metrics, stats, _ = on_two[0][name][0]
    every = [rank[name][0] for rank in on_four]
    assert [theirs for theirs, _, _ in every] == [metrics] * 4
    for place in range(2):  # along the other axis; each has states of its own experts
        assert_same([own for _, _, own in every[place::2]], on_two[place][name][0][2])
    assert stats and [sorted(own) for _, own, _ in every] == [sorted(stats), [], [], []]


@pytest.mark.parametrize("name", RESUMED)
def test_stages_beside_other_axes_go_on_from_their_checkpoint(on_four, name):
    for (metrics, _, through), (later, again) in (rank[name] for rank in on_four):
        assert later == metrics[BREAK:]
        assert again.keys() == through.keys() and all(torch.equal(again[key], through[key]) for key in through)


@pytest.mark.parametrize("name", ON_FOUR)
def test_one_process_reads_the_same_from_the_checkpoint_of_such_stages(on_four, folder, name):
    one, other = (loaded(beside(name, 1), folder / f"{name} {pp}") for pp in (1, 2))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_tied_head_has_one_part_on_two_ranks_of_each_place_along_tp(on_two, on_four):
    name, table = "tied matrices", "embedding.weight"
    metrics, _, whole = on_two[0][name][0]
    every = [rank[name][0] for rank in on_four]
    for theirs, _, _ in every:
        for step, expected in zip(theirs, metrics, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
    first, *others = (own for _, _, own in every)
    shared = {key for key in whole if key.startswith(table)}
    assert all(torch.equal(own[key], first[key]) for own in others for key in shared)
    assert first.keys() & others[1].keys() == shared and first.keys() | others[1].keys() == whole.keys()
