"""The order of windows: a bijection for each epoch, and a pure function of (seed, sample)."""

import time

import numpy as np
import pytest

from hqsweep.shards.order import permuted, window_starts

KEYS = np.random.Philox(key=7).random_raw(6)


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 1000, 1_000_003])
def test_order_is_a_bijection(count: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(count), count, KEYS)), np.arange(count))


def test_places_of_a_huge_range_are_found_one_by_one_and_mix_well() -> None:
    count, places = 10**10, np.arange(0, 10**10, 10**5)
    start = time.process_time()
    images = permuted(places, count, KEYS)
    assert time.process_time() - start < 1 and len(np.unique(images)) == len(places)
    assert abs(np.corrcoef(places, images)[0, 1]) < 0.02 and images.min() >= 0 and images.max() < count


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order_from_another_shift() -> None:
    tokens, context = 1000, 9
    count = (tokens - 1) // context - 1
    first, second = (window_starts(5, np.arange(count) + epoch * count, tokens, context) for epoch in (0, 1))
    for starts in (first, second):
        assert set(np.diff(np.sort(starts))) == {context} and starts.min() >= 0
        assert starts.max() + context + 1 <= tokens
    assert not np.array_equal(first - first.min(), second - second.min()) and first.min() != second.min()


def test_a_sample_does_not_depend_on_what_is_asked_beside_it() -> None:
    whole = window_starts(3, np.arange(400), 5000, 64)
    assert [int(window_starts(3, np.array([i]), 5000, 64)[0]) for i in range(400)] == whole.tolist()
    assert window_starts(4, np.arange(400), 5000, 64).tolist() != whole.tolist()


def test_the_order_is_pinned() -> None:
    # a change here would make new runs incomparable with stored ones
    assert window_starts(1, np.arange(6), 100_000, 64).tolist() == [8383, 58175, 3007, 60287, 40959, 34367]


@pytest.mark.parametrize("tokens", [11, 12, 20, 21, 30])
def test_few_tokens_give_windows_inside_them(tokens: int) -> None:
    starts = window_starts(0, np.arange(50), tokens, 10)
    assert starts.min() >= 0 and starts.max() + 11 <= tokens
