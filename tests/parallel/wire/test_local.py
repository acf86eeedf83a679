"""Squares of norms of tensors, some of which are cut over ranks, in the order of the tensors."""

import pytest
import torch

from hqsweep.parallel.wire import local


@pytest.fixture
def cut(monkeypatch):
    """Tensors that count as cut over two ranks, each of which has as much of them; and the collectives that ran."""
    tensors, sums = [], []

    def all_reduce(x, group):
        sums.append(len(x))
        x *= 2

    monkeypatch.setattr(local, "shard_groups", lambda x: ("group",) if any(x is each for each in tensors) else ())
    monkeypatch.setattr(local.dist, "all_reduce", all_reduce)
    return tensors, sums


def test_each_tensor_keeps_its_place_among_those_that_are_cut_otherwise(cut):
    own, sums = cut
    tensors = [torch.full((n,), 2.0) for n in (1, 2, 3, 4, 5)]
    own += [tensors[1], tensors[4]]
    assert local.squared_norms(tensors).tolist() == pytest.approx([4, 2 * 8, 12, 16, 2 * 20])
    assert sums == [2]
    own[:] = tensors
    assert local.squared_norms(tensors).tolist() == pytest.approx([8, 16, 24, 32, 40])
    assert sums == [2, 5]
