"""Trainings whose layers are shared out over ranks against the training in one process with as many microbatches."""

import pytest
import torch
from support.parallel.staged_ranks import (
    BREAK,
    CASES,
    FACTS,
    TIED,
    assert_same,
    facts_of,
    resumed,
    staged,
    train_all,
    trained,
)
from support.parallel.training_ranks import trainer
from support.ranks import backend as backend
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backend):
    return tmp_path_factory.mktemp("staged")


@pytest.fixture(scope="module")
def wholes(folder):
    return {name: trained(staged(name, pp=1), folder / "one" / name) for name in CASES}


@pytest.fixture(scope="module")
def results(folder, wholes, backend):
    return run_ranks(2, train_all, folder, backend=backend)


@pytest.mark.feature("H23")
@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process_does(results, wholes, name):
    """Metrics are those of all stages on each rank; the first has the statistics and operands of one process."""
    metrics, stats, whole = wholes[name]
    parts = [rank[name][0] for rank in results]
    assert [theirs for theirs, _, _ in parts] == [metrics] * 2
    assert_same([own for _, _, own in parts], whole)
    assert [sorted(own) for _, own, _ in parts] == [sorted(stats), []]


@pytest.mark.feature("H23")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", ["stages", "one process"])
def test_stages_go_on_from_a_checkpoint(results, wholes, name, source):
    metrics, _, whole = wholes[name]
    parts = [rank[name][1 if source == "stages" else 2] for rank in results]
    assert [later for later, _ in parts] == [metrics[BREAK:]] * 2
    assert_same([own for _, own in parts], whole)


@pytest.mark.feature("H23")
@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_the_checkpoint_of_stages(results, wholes, folder, name):
    metrics, _, whole = wholes[name]
    later, own = resumed(staged(name, pp=1), folder / name)
    assert later == metrics[BREAK:]
    assert_same([own, {}], whole)


@pytest.mark.feature("H23")
@pytest.mark.parametrize("name", FACTS)
def test_the_manifest_has_the_facts_of_all_layers(results, name):
    assert [rank["facts"][name] for rank in results] == [facts_of(trainer(staged(name, pp=1)))] * 2


@pytest.mark.feature("H23")
def test_a_tied_head_has_one_weight_on_two_ranks(results, folder):
    metrics, _, whole = trained(staged(TIED, pp=1), folder / "one" / TIED)
    (first, last), table = ([rank[TIED][i] for rank in results] for i in (0, 1)), "embedding.weight"
    for theirs, _, _ in first:
        for step, expected in zip(theirs, metrics, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
    own = [content for _, _, content in first]
    shared = own[0].keys() & own[1].keys()
    assert shared == {key for key in whole if key.startswith(table)} and own[0].keys() | own[1].keys() == whole.keys()
    assert all(torch.equal(own[0][key], own[1][key]) for key in shared)
    for (theirs, _, through), (later, again) in zip(first, last, strict=True):
        assert later == theirs[BREAK:]
        assert all(torch.equal(through[key], again[key]) for key in through)
