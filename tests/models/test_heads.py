"""Which linear is the output projection."""

import pytest
from torch import nn

from hqsweep.models.heads import output_projection


def model(rows=48, said=None):
    network = nn.Sequential(nn.Embedding(48, 16), nn.Linear(16, 48), nn.Linear(48, rows))
    if said:
        network.get_output_embeddings = lambda: said(network)
    return network


def refuses(network):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("network", "index"),
    [
        (model(), 2),
        (model(rows=47), None),
        (model(said=lambda made: made[1]), 1),
        (model(said=lambda made: None), 2),
        (model(said=refuses), 2),
        (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), None),
        (nn.Sequential(nn.Embedding(48, 16)), None),
        (nn.Sequential(nn.Embedding(48, 16), nn.LazyLinear(48)), 1),
    ],
)
def test_it_is_the_one_that_the_model_says_or_the_last_with_a_row_for_each_word(network, index):
    assert output_projection(network) is (None if index is None else network[index])
