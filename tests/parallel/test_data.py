"""Samples of several ranks joined, against those of the whole matrix in float64."""

import pytest
import torch

from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.nn.core.probe import Key, Sample, Tokens, rows_of
from hqsweep.ops.stats import gather, output_sums
from hqsweep.parallel.data import joined

FORMAT = parse("mxfp8")


def sample(x, direction="rowwise", cut=None):
    x = x if direction == "rowwise" else x.t().contiguous()
    return Sample(sums=gather(x, FORMAT, FORMAT.encode(x)).read(), format="mxfp8", cut=cut)


def row(samples, *key):
    (row_of_key,) = (r for r in rows_of(1, samples) if (r["layer"], r["tensor"], r["direction"]) == key[:3])
    return row_of_key


def assert_close(got, expected):
    """But for the order of sums."""
    assert all(own == wanted or own == pytest.approx(wanted, rel=1e-12) for own, wanted in zip(
        got.values(), expected.values(), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_matrices_and_tokens_of_ranks_are_joined_to_the_whole(axis, direction):
    """Two ranks share matrices, and two such pairs have other tokens."""
    tokens, key = [draw(kind, 64, 128, 1) for kind in ("heavy", "row_scaled")], Key("l", "input", direction)
    ranks = [{key: sample(part, direction, cut=axis)} for x in tokens for part in x.chunk(2, axis)]
    expected = rows_of(1, {key: sample(torch.cat(tokens), direction)})[0]
    assert_close(row(joined(ranks, 2), *key), expected)


def test_what_ranks_have_whole_is_counted_once_and_weights_once_over_all():
    x, w = [draw("normal", 32, 64, seed) for seed in range(2)], draw("heavy", 32, 64)
    ranks = [
        {Key("l", "input", "rowwise"): sample(of_rank), Key("l", "weight", "rowwise"): sample(part, cut=0)}
        for of_rank in x
        for part in w.chunk(2)
    ]
    total = joined(ranks, 2)
    for tensor, whole in (("input", torch.cat(x)), ("weight", w)):
        expected = rows_of(1, {Key("l", tensor, "rowwise"): sample(whole)})[0]
        assert_close(row(total, "l", tensor, "rowwise"), expected)


def test_layers_of_other_ranks_stand_beside_and_a_rank_may_have_none():
    first, second = ({Key(layer, "input", "rowwise"): sample(draw("normal", 32, 64))} for layer in "ab")
    total = joined([first, {}, second, {}], 1)
    assert [key[0] for key in total] == ["a", "b"] and total == first | second


def test_outputs_and_tokens_add_up():
    outputs, counts = Key("l", "fprop", "output"), Key("m.0", "routed", "output")
    pairs = [(draw("normal", 8, 8, seed), draw("normal", 8, 8, 9 + seed)) for seed in range(4)]
    ranks = [
        {outputs: Sample(sums=output_sums(*pair), cut=1), counts: Sample(sums=Tokens(index // 2, 4, 2))}
        for index, pair in enumerate(pairs)
    ]
    total = joined(ranks, 2)
    x, q = (torch.cat(each).double() for each in zip(*pairs, strict=True))
    assert row(total, *outputs[:3])["rel_l2"] == pytest.approx(float((x - q).norm() / x.norm()))
    assert (row(total, *counts[:3])["tokens"], row(total, *counts[:3])["load"]) == (1.0, 0.25)
