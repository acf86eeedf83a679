"""Shards as one sequence of tokens, of which windows are read.

Windows are read by `pread`, not from a memory map: pages of a map count as memory of the process while the system has
room for them, and 100 GB of shards must not look like 100 GB of memory.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from hqsweep.errors import Damaged, UserError

CHUNK = 1 << 22
OPEN_FILES = 64
REMEDY = "copy the folder again, or prepare it anew"


@dataclass(frozen=True, kw_only=True)
class Part:
    """`tokens` tokens of a file, from byte `offset` on."""

    path: Path
    offset: int
    tokens: int


class Stream:
    """The tokens of several files one after another, in the files' dtype, little-endian.

    Raises:
        Damaged: a file is missing, or shorter than its part.
    """

    def __init__(self, parts: Iterable[Part], dtype: np.dtype) -> None:
        self.parts = tuple(part for part in parts if part.tokens)
        self.dtype = np.dtype(dtype)
        self._opened = lru_cache(OPEN_FILES)(lambda path: path.open("rb", buffering=0))
        self.ends = np.cumsum([part.tokens for part in self.parts], dtype=np.int64)
        for part in self.parts:
            size = part.path.stat().st_size if part.path.is_file() else -1
            if size < (end := part.offset + part.tokens * self.dtype.itemsize):
                fault = "is missing" if size < 0 else f"has {size:,} bytes, and its tokens end at byte {end:,}"
                raise Damaged(part.path, fault, REMEDY)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    @property
    def nbytes(self) -> int:
        return len(self) * self.dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens [start, start + count), in the dtype of the files."""
        read = np.empty(count, self.dtype)
        at, part = 0, int(np.searchsorted(self.ends, start, side="right"))
        while at < count:
            first = int(self.ends[part]) - self.parts[part].tokens
            inside = start + at - first
            number = min(count - at, self.parts[part].tokens - inside)
            self._read(self.parts[part], inside, read[at : at + number])
            at, part = at + number, part + 1
        return read

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The tokens [start, start + length) for each start: int64 [starts, length]."""
        return np.stack([self.read(int(start), length) for start in starts]).astype(np.int64)

    def chunks(self) -> Iterator[np.ndarray]:
        """All tokens, a few million at a time."""
        for start in range(0, len(self), CHUNK):
            yield self.read(start, min(CHUNK, len(self) - start))

    def cut(self, start: int, stop: int) -> "Stream":
        """The tokens [start, stop) as a stream of their own."""
        first, parts = 0, []
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.tokens)
            if low < high:
                parts.append(replace(part, offset=part.offset + low * self.dtype.itemsize, tokens=high - low))
            first += part.tokens
        return Stream(parts, self.dtype)

    def _read(self, part: Part, inside: int, into: np.ndarray) -> None:
        view, at = memoryview(into.view(np.uint8)), part.offset + inside * self.dtype.itemsize
        while view:
            got = os.preadv(self._opened(part.path).fileno(), [view], at)
            if not got:
                raise Damaged(part.path, "became shorter while it was read", REMEDY)
            view, at = view[got:], at + got


def unigram_entropy(chunks: Iterable[np.ndarray]) -> float:
    """-sum_t p[t] ln p[t] in nats a token, p being the frequencies in the chunks themselves (1-D, integers). UserError
    for negative ones."""
    counts = np.zeros(1, np.int64)
    for chunk in chunks:
        if chunk.dtype.kind == "i" and len(chunk) and (least := chunk.min()) < 0:
            raise UserError(f"data.path: the shards hold token {least}; tokens are 0 or more, so prepare them anew")
        merged = np.bincount(chunk, minlength=len(counts))
        merged[: len(counts)] += counts
        counts = merged
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


ROUNDS = 6
ORDER = 0x6F726465  # second key word: keeps the order apart from other users of the same seed
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def window_starts(seed: int, samples: np.ndarray, tokens: int, context: int) -> np.ndarray:
    """First tokens of the windows of context + 1 tokens, int64, one for each sample.

    samples: int64, step * batch + row. Windows lie `context` apart, as the last token of one is only a target and the
    first input of the next. An epoch reads all n = max(1, (tokens - 1) // context - 1) of them once, permuted by
    (seed, epoch), and shifted as a whole by as much as fits, so that windows of two epochs begin in different places.
    tokens: of the split, at least context + 1.
    """
    count = max(1, (tokens - 1) // context - 1)
    epochs, places = np.divmod(np.asarray(samples, np.int64), count)
    starts = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        words = _words(seed, epoch)
        shift = int(words[-1] % np.uint64(tokens - count * context))
        starts[here] = permuted(places[here], count, words[:-1]) * context + shift
    return starts


def sample_places(seed: int, samples: np.ndarray, count: int) -> np.ndarray:
    """Places in [0, count) of samples, int64 [n], each epoch of which reads every place once, permuted by (seed,
    epoch)."""
    epochs, places = np.divmod(np.asarray(samples, np.int64), count)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        places[here] = permuted(places[here], count, _words(seed, epoch)[:-1])
    return places


def _words(seed: int, epoch: int) -> np.ndarray:
    """The random numbers of an epoch's order, uint64 [ROUNDS + 1]."""
    philox = np.random.Philox(key=np.array([seed, ORDER], np.uint64), counter=np.array([0, 0, epoch, 0], np.uint64))
    return philox.random_raw(ROUNDS + 1)


def permuted(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Images of places [n], int64, under the permutation of [0, count) that keys [rounds], uint64, give."""
    half = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    values = np.asarray(places, np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _network(values[outside], half, keys)
        outside = values >= count
    return values.astype(np.int64)


def _network(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """The Feistel network over numbers of 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(words: np.ndarray) -> np.ndarray:
    """splitmix64's output function (Steele, Lea and Flood 2014), uint64."""
    words = words + GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def spread_starts(first: int, count: int, choices: int) -> np.ndarray:
    """int64: the places first..first+count-1 of a walk over [0, choices) in golden-section strides.

    Every beginning of the walk is nearly evenly spaced, and no place repeats before all have come.
    """
    stride = max(1, round(choices * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, choices) != 1:
        stride += 1
    return np.arange(first, first + count, dtype=np.int64) * stride % choices
