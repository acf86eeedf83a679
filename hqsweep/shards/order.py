"""Which windows a step reads: a permutation of all windows for each epoch, computed and never stored.

A Feistel network permutes [0, 2**(2k)); an image outside [0, n) is permuted again until it is inside (cycle walking),
which leaves a bijection of [0, n). Each place is computed alone, so that a resumed run needs no state.
"""

import numpy as np

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
        words = np.random.Philox(
            key=np.array([seed, ORDER], np.uint64), counter=np.array([0, 0, epoch, 0], np.uint64)
        ).random_raw(ROUNDS + 1)
        shift = int(words[-1] % np.uint64(tokens - count * context))
        starts[here] = permuted(places[here], count, words[:-1]) * context + shift
    return starts


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
