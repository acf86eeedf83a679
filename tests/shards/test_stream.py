"""Shards as one sequence of tokens."""

import time
from pathlib import Path

import numpy as np
import pytest

from hqsweep.errors import Damaged
from hqsweep.shards.stream import Part, Stream, permuted, unigram_entropy, window_starts


def stream_of(folder: Path, *parts: list) -> Stream:
    for number, tokens in enumerate(parts):
        np.asarray(tokens, "<u2").tofile(folder / f"{number}.bin")
    return Stream(
        [Part(path=folder / f"{i}.bin", offset=0, tokens=len(part)) for i, part in enumerate(parts)], np.dtype("<u2")
    )


def test_windows_reach_over_the_ends_of_shards(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(5), [], range(5, 7), range(7, 20))
    assert len(stream) == 20 and stream.nbytes == 40
    windows = stream.windows(np.array([0, 3, 4, 12]), 8)
    assert windows.dtype == np.int64 and np.array_equal(windows, np.array([[0], [3], [4], [12]]) + np.arange(8))
    assert np.array_equal(np.concatenate(list(stream.chunks())), np.arange(20))


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (3, 12), (5, 7), (6, 6), (19, 20)])
def test_a_cut_is_a_stream_of_the_tokens_between(tmp_path: Path, start: int, stop: int) -> None:
    part = stream_of(tmp_path, range(5), range(5, 7), range(7, 20)).cut(start, stop)
    assert len(part) == stop - start and part.read(0, len(part)).tolist() == list(range(start, stop))


def test_a_file_that_is_short_or_gone_is_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(5), range(5, 9))
    (tmp_path / "1.bin").write_bytes(b"12")
    with pytest.raises(Damaged, match=r"1\.bin: became shorter while it was read"):
        stream.read(4, 4)
    with pytest.raises(Damaged, match=r"1\.bin: has 2 bytes, and its tokens end at byte 8"):
        stream.cut(5, 9)
    (tmp_path / "1.bin").unlink()
    with pytest.raises(Damaged, match=r"1\.bin: is missing"):
        stream.cut(0, 9)


def test_entropy_of_chunks_is_that_of_all() -> None:
    chunks = [np.array([0, 1], np.uint16), np.array([5, 5], np.uint32)]
    assert unigram_entropy(chunks) == pytest.approx(1.5 * np.log(2))


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
