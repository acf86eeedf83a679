"""Data of a run: `load` gives a Dataset, and `Dataset.batch` is a pure function of its arguments.

A batch depends on nothing but the data, the split, the seed, the step and the shape. So every recipe of a sweep sees
identical batches, and a resumed run needs no state of the data. Randomness is counter-based (Philox).
"""

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from hqsweep.config.train import LEARNT_NATS, DataConfig, FactoryDataConfig
from hqsweep.errors import UserError, nearest
from hqsweep.shards.reader import Shards
from hqsweep.shards.stream import Stream, spread_starts, window_starts
from hqsweep.shards.stream import unigram_entropy as entropy_of
from hqsweep.train import corpus
from hqsweep.train.corpus import Corpus, MarkovSource

CHUNK = 1 << 20
PLENTY = 64
"""An estimated number of windows that is enough to call a split long enough."""
BATCHES = 0x62617463  # second key word: keeps the batch stream apart from other users of the same seed


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokens of both splits. train, val: 1-D uint8 or uint16 (possibly memory-mapped), values in [0, vocab_size); for
    shards a Stream.

    hash: SHA-256 over source, split and content, in hex. facts: JSON values for the manifest. Among them are
    unigram_entropy_nats, the loss of val under its own token frequencies, which a trained model must beat, and for a
    Markov source entropy_rate_nats, which no model can beat.
    """

    train: np.ndarray | Stream
    val: np.ndarray | Stream
    vocab_size: int
    hash: str
    facts: dict

    def batch(self, split: str, seed: int, step: int, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), int64 [batch, context] on the CPU; targets[b, t] is the token after inputs[b, t].

        "train": windows at random offsets, keyed by (seed, step). "val": `step` counts the batches of one evaluation
        from 0. The windows are disjoint, evenly spread, and the same for every seed; all come before any repeats.

        Raises:
            UserError: the split is shorter than context + 1 tokens.
        """
        _check_window(split, len({"train": self.train, "val": self.val}[split]), context)
        if split == "train":
            windows = self._train_windows(seed, step, batch, context)
        else:
            starts = context * spread_starts(step * batch, batch, (len(self.val) - 1) // context)
            windows = self._windows(self.val, starts, context + 1)
        tokens = torch.from_numpy(windows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _train_windows(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """int64 [batch, context + 1] at random offsets."""
        return self._windows(self.train, _random_starts(seed, step, batch, len(self.train) - context), context + 1)

    def _windows(self, data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [starts, length]: the tokens from each start on."""
        return data[starts[:, None] + np.arange(length)].astype(np.int64)

    def epochs(self, tokens: int) -> float:
        """How often a run of `tokens` tokens reads the train split."""
        return tokens / len(self.train)

    def warnings(self, tokens: int) -> list[str]:
        """A warning if a run on `tokens` tokens repeats its data, else []."""
        if self.epochs(tokens) <= 1:
            return []
        return [
            f"training reads its {len(self.train):,} tokens {self.epochs(tokens):.2f} times; what repeats is learned by"
            " heart, and a gap on it is not the gap on new text: give more data (data=site has the most on a machine),"
            " or lower train.steps or train.batch"
        ]

    def untrained(self, val_loss: float | None) -> list[str]:
        """A warning if a run that ends with this loss has hardly learnt anything, else []."""
        entropy = self.facts["unigram_entropy_nats"]
        if val_loss is None or val_loss <= entropy - LEARNT_NATS:
            return []
        return [
            f"barely trained: the validation loss does not end {LEARNT_NATS:g} nats below the unigram entropy of the"
            f" data ({entropy:.3f} nats), which needs no context, so a gap says little about a trained model; give more"
            " train.steps, or a higher train.lr"
        ]


@dataclass(frozen=True, kw_only=True)
class ShardedDataset(Dataset):
    """Tokens that stay on disk: train and val are streams, and an epoch reads each window of train once."""

    def _train_windows(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        samples = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
        return self._windows(self.train, window_starts(seed, samples, len(self.train), context), context + 1)

    def _windows(self, data: Stream, starts: np.ndarray, length: int) -> np.ndarray:
        windows = data.windows(starts, length)
        if windows.min() < 0 or windows.max() >= self.vocab_size:
            wrong = windows.min() if windows.min() < 0 else windows.max()
            raise UserError(
                f"data.path: the shards hold token {wrong}, and their vocabulary has {self.vocab_size}; mend"
                " vocab_size in meta.json, or prepare them anew"
            )
        return windows


def load(config: DataConfig) -> Dataset:
    """Read or generate the data that config names (source, path, val_fraction, max_bytes, markov).

    Raises:
        UserError: an unknown source, or data that is missing, unreadable, empty or too short to be split.
        Damaged: shards that are not what was written.
    """
    if config.source not in SOURCES:
        raise UserError(
            f"data.source: {config.source!r} is not known{nearest(config.source, SOURCES)}; choose {', '.join(SOURCES)}"
        )
    try:
        return SOURCES[config.source](config)
    except OSError as error:
        raise UserError(f"data.path: cannot read {error.filename}: {error.strerror}") from None


def _in_memory(read: Callable[[DataConfig], Corpus]) -> Callable[[DataConfig], Dataset]:
    """A function that gives the Dataset of a reader's arrays of tokens."""

    def dataset(config: DataConfig) -> Dataset:
        source = read(config)
        _check_split(config, source.train, source.val)
        fields = {
            "source": config.source,
            "split": source.split,
            "bytes": source.train.nbytes + source.val.nbytes,
            "unigram_entropy_nats": unigram_entropy(source.val),
            **source.facts,
        }
        if max(source.train.nbytes, source.val.nbytes) > corpus.WHOLE_BYTES:
            fields["hashed"] = corpus.how_hashed()
        digest = corpus.content_hash([config.source, source.split, source.vocab_size], [source.train, source.val])
        return Dataset(train=source.train, val=source.val, vocab_size=source.vocab_size, hash=digest, facts=fields)

    return dataset


def _shards(config: DataConfig) -> Dataset:
    """The Dataset of a folder of shards. max_bytes keeps the beginnings of both splits."""
    if config.path is None or not Path(config.path).exists():
        raise UserError(f"data.path: '{config.path}' does not exist; data.source=shards reads a folder of shards")
    shards = Shards(config.path, val_fraction=config.val_fraction)
    shards.check()
    train, val = shards.train, shards.val
    _check_split(config, train, val)
    entropy = shards.unigram_entropy
    if config.max_bytes is not None and config.max_bytes < train.nbytes + val.nbytes:
        share = config.max_bytes / (train.nbytes + val.nbytes)
        train, val = (stream.cut(0, int(len(stream) * share)) for stream in (train, val))
        _check_split(config, train, val)
        entropy = partial(entropy_of, val.chunks())
    fields = {
        "source": config.source,
        "layout": shards.layout,
        "split": shards.split,
        "bytes": train.nbytes + val.nbytes,
        "files": len(train.parts) + len(val.parts),
        "documents": shards.documents,
        "unigram_entropy_nats": entropy(),
    }
    if shards.manifest:
        fields |= {"tokenizer": shards.manifest.tokenizer.sha256, "separator": shards.manifest.separator.id}
    digest = corpus.content_hash([config.source, shards.vocab_size, shards.hash, len(train), len(val)], [])
    return ShardedDataset(train=train, val=val, vocab_size=shards.vocab_size, hash=digest, facts=fields)


def _check_split(config: DataConfig, train: Sized, val: Sized) -> None:
    for name, tokens in (("train", train), ("val", val)):
        if len(tokens) < 2:
            raise UserError(
                f"data: the {name} split of data.source={config.source} has {len(tokens)} tokens, at least 2 are"
                " needed; give more data, or change data.val_fraction or data.max_bytes"
            )


def loaded(config: DataConfig) -> Dataset:
    """load(config), cached until another config comes or the files change, so that successive runs read data once."""
    return _loaded(config.model_copy(update={"hash": None}), corpus.stamp_of(config))


@lru_cache(maxsize=1)
def _loaded(config: DataConfig, stamp: corpus.Stamp) -> Dataset:
    """load(), cached by config and stamp."""
    return load(config)


def check_same(config: DataConfig, dataset: Dataset, stamp: corpus.Stamp) -> None:
    """UserError where files that a run reads while it trains have changed since they had this stamp.

    Data that was read into memory cannot change.
    """
    if not isinstance(dataset.train, np.memmap | Stream) or corpus.stamp_of(config) == stamp:
        return
    if isinstance(dataset.train, Stream):
        now = load(config).hash
    else:  # a replaced file stays the file that was opened
        words = [config.source, dataset.facts["split"], dataset.vocab_size]
        now = corpus.content_hash(words, [dataset.train, dataset.val])
    if now != dataset.hash:
        raise UserError(
            f"{corpus.where(config)} were changed while the run read them; put the old data back, and give the sweep's"
            " command again, which goes on from the last checkpoint"
        )


def check_length(config: DataConfig, context: int) -> None:
    """UserError where a split is too short for a window of `context` tokens, or the data cannot be read.

    Files whose sizes promise plenty are not read for it. Samples of a Python function have the length that they have.
    """
    if isinstance(config, FactoryDataConfig):
        return
    if config.source == "markov":
        sizes = {"train": config.markov.length, "val": round(config.markov.length * config.val_fraction)}
    elif config.source != "shards" and _expected(config) > PLENTY * context:
        return
    else:
        dataset = loaded(config)
        sizes = {"train": len(dataset.train), "val": len(dataset.val)}
    for split, tokens in sizes.items():
        _check_window(split, tokens, context)


def _check_window(split: str, tokens: int, context: int) -> None:
    if tokens <= context:
        raise UserError(
            f"data: the {split} split has {tokens} tokens, too short for train.context={context}, which needs"
            f" {context + 1}; lower train.context or give more data"
        )


def _expected(config: DataConfig) -> float:
    """The tokens of the smaller split, estimated from the sizes of files."""
    share = min(config.val_fraction, 1 - config.val_fraction)
    total = math.inf  # packages and the standard library have megabytes on every machine
    if config.path is not None:
        path = Path(config.path)
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        total = sum(file.stat().st_size for file in files)
    tokens = min(total, config.max_bytes or math.inf) * share
    return tokens / np.dtype("<u2").itemsize if config.source == "tokens" else tokens


def unigram_entropy(tokens: np.ndarray) -> float:
    """-sum_t p[t] ln p[t] in nats, where p are the token frequencies in `tokens` (1-D, uint8 or uint16)."""
    return entropy_of(tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK))


def _markov(config: DataConfig) -> Corpus:
    """A corpus of `length` tokens to train on, and val_fraction * length tokens of a second chain to validate."""
    markov = config.markov
    source = MarkovSource.draw(
        vocab=markov.vocab, order=markov.order, concentration=markov.concentration, seed=markov.seed
    )
    return Corpus(
        train=source.sample(markov.length, seed=2 * markov.seed),
        val=source.sample(round(markov.length * config.val_fraction), seed=2 * markov.seed + 1),
        vocab_size=markov.vocab,
        split="independent chains of one source",
        facts={"files": 0, "entropy_rate_nats": source.entropy_rate()},
    )


def _samples(config: FactoryDataConfig) -> Dataset:
    from hqsweep.train.batches import load_batches  # not for tokens

    return load_batches(config)


SOURCES: dict[str, Callable[[DataConfig], Dataset]] = {
    "stdlib": _in_memory(lambda config: corpus.stdlib(config.val_fraction, config.max_bytes)),
    "site": _in_memory(lambda config: corpus.site(config.val_fraction, config.max_bytes)),
    "text": _in_memory(lambda config: corpus.text(config.path, config.val_fraction, config.max_bytes)),
    "tokens": _in_memory(lambda config: corpus.tokens(config.path, config.val_fraction, config.max_bytes)),
    "shards": _shards,
    "markov": _in_memory(_markov),
    "factory": _samples,
}


def _random_starts(seed: int, step: int, count: int, choices: int) -> np.ndarray:
    """`count` integers in [0, choices), int64; raw Philox words, whose stream numpy never changes (NEP 19)."""
    bits = np.random.Philox(key=np.array([seed, BATCHES], np.uint64), counter=np.array([0, 0, step, 0], np.uint64))
    unit = (bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (unit * choices).astype(np.int64)
