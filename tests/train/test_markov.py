"""The Markov source: its entropy rate is exact, and its sample is the chain it claims to be."""

import bisect
import math

import numpy as np
import pytest

from hqsweep.errors import UserError
from hqsweep.train.corpus import BURN_IN, MarkovSource


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_entropy_rate_of_two_states_equals_the_closed_form():
    leave0, leave1 = 0.1, 0.4
    source = MarkovSource(rows=np.array([[1 - leave0, leave0], [leave1, 1 - leave1]]))
    expected = (leave1 * binary_entropy(leave0) + leave0 * binary_entropy(leave1)) / (leave0 + leave1)
    assert source.entropy_rate() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(source.stationary(), [0.8, 0.2], atol=1e-12)


def test_periodic_chain_converges_and_has_no_entropy():
    source = MarkovSource(rows=np.array([[0.0, 1.0], [1.0, 0.0]]))
    np.testing.assert_allclose(source.stationary(), [0.5, 0.5])
    assert source.entropy_rate() == 0


def test_stationary_distribution_is_the_eigenvector_of_the_context_chain():
    source = MarkovSource.draw(vocab=3, order=2, concentration=0.5, seed=4)
    chain = np.zeros((9, 9))  # context (a, b) -> (b, c)
    for context in range(9):
        for token in range(3):
            chain[context, context % 3 * 3 + token] = source.rows[context, token]
    values, vectors = np.linalg.eig(chain.T)
    vector = np.real(vectors[:, np.argmin(abs(values - 1))])
    np.testing.assert_allclose(source.stationary(), vector / vector.sum(), atol=1e-10)


@pytest.mark.parametrize(("vocab", "order", "concentration"), [(16, 2, 0.4), (5, 1, 1.0), (4, 3, 0.2)])
def test_long_sample_has_the_computed_entropy(vocab, order, concentration):
    source = MarkovSource.draw(vocab=vocab, order=order, concentration=concentration, seed=1)
    tokens = source.sample(400_000, seed=9).astype(np.int64)
    contexts = sum(tokens[i : len(tokens) - order + i] * vocab ** (order - 1 - i) for i in range(order))
    nats = -np.log(source.rows[contexts, tokens[order:]])
    means = nats[: len(nats) // 100 * 100].reshape(100, -1).mean(axis=1)  # batch means: neighbours are correlated
    error = means.std(ddof=1) / 10
    assert error < 0.01
    assert means.mean() == pytest.approx(source.entropy_rate(), abs=5 * error)
    # and without knowing the rows: conditional entropy of the counts, with Miller and Madow's correction of its bias
    counts = np.zeros_like(source.rows)
    np.add.at(counts, (contexts, tokens[order:]), 1)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    plug_in = -(counts * np.log(shares, out=np.zeros_like(shares), where=shares > 0)).sum() / counts.sum()
    bias = ((counts > 0).sum() - (counts.sum(axis=1) > 0).sum()) / (2 * counts.sum())
    assert plug_in + bias == pytest.approx(source.entropy_rate(), abs=5 * error + bias)


@pytest.mark.parametrize("concentration", [0.01, 0.4, 50.0])
def test_sample_equals_the_chain_run_token_by_token(concentration):
    source = MarkovSource.draw(vocab=4, order=2, concentration=concentration, seed=0)
    length = 3000
    sample = source.sample(length, seed=5)
    pieces = round((length + BURN_IN) ** 0.5)
    steps = -(-(length + BURN_IN) // pieces)
    uniforms = np.random.Generator(np.random.Philox([5, 1])).random(pieces * steps)
    cumulative = source.rows.cumsum(axis=1)[:, :-1].tolist()
    older, newer, chain = 0, 0, []
    for u in uniforms[: length + BURN_IN]:
        older, newer = newer, bisect.bisect_right(cumulative[older * 4 + newer], u)
        chain.append(newer)
    np.testing.assert_array_equal(sample, chain[BURN_IN:])


def test_sample_is_reproducible_and_seeded():
    source = MarkovSource.draw(vocab=8, order=2, concentration=0.4, seed=0)
    np.testing.assert_array_equal(source.sample(500, seed=1), source.sample(500, seed=1))
    assert (source.sample(500, seed=1) != source.sample(500, seed=2)).any()
    assert (source.rows != MarkovSource.draw(vocab=8, order=2, concentration=0.4, seed=1).rows).all()


def test_tokens_beyond_a_byte_are_uint16():
    source = MarkovSource.draw(vocab=300, order=1, concentration=1.0, seed=0)
    tokens = source.sample(20_000, seed=0)
    assert tokens.dtype == np.uint16
    assert 256 <= tokens.max() < 300


def test_table_that_would_not_fit_is_refused():
    with pytest.raises(UserError, match=r"data.markov: vocab 256 with order 3 .*; lower vocab or order"):
        MarkovSource.draw(vocab=256, order=3, concentration=1.0, seed=0)
