"""Shards as one sequence of tokens."""

from pathlib import Path

import numpy as np
import pytest

from hqsweep.errors import Damaged
from hqsweep.shards.stream import Part, Stream, unigram_entropy


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
