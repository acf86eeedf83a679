"""BatchDataset: samples that a Python function gives, such as images with labels, as a Dataset of the training loop.

The function returns the splits train and val, each with len() and [i]: a mapping {"train": ..., "val": ...}, or a pair.
A sample is a tensor, an array or a number, or a mapping, list or tuple of samples. All samples have the same shapes.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hqsweep.config.train import FactoryDataConfig
from hqsweep.errors import UserError
from hqsweep.models.batches import Packing
from hqsweep.models.build import code_of_modules
from hqsweep.shards.stream import sample_places, spread_starts
from hqsweep.train.adapter import keyed_seed

HASHED = 64
"""Samples of each split that the hash of the data covers."""
SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class BatchDataset:
    """Samples of both splits, with the methods of train.data.Dataset. train, val: objects with len() and [i]. packing:
    the layout of a batch. vocab_size is 0, as there are no tokens."""

    train: Any
    val: Any
    packing: Packing
    vocab_size: int
    hash: str
    facts: dict[str, Any]

    def batch(self, split: str, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """(uint8 [batch, bytes], uint8 [batch, 0]): samples by Packing, and nothing beside them.

        "train": an epoch reads every sample once, in an order by (seed, epoch). "val": `step` counts the batches of one
        evaluation from 0. Random numbers of torch, NumPy and Python that samples draw depend on seed and step alone.
        """
        samples = getattr(self, split)
        if split == "train":
            numbers = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
            places = sample_places(seed, numbers, len(samples)).tolist()
        else:
            places = spread_starts(step * batch, batch, len(samples)).tolist()
        with drawing(seed if split == "train" else 0, step):
            packed = self.packing.pack(collated(samples, places))
        return packed, packed[:, :0]

    def epochs(self, tokens: int) -> float:
        return tokens / len(self.train)

    def warnings(self, tokens: int) -> list[str]:
        return []

    def untrained(self, val_loss: float | None) -> list[str]:
        return []


def load_batches(config: FactoryDataConfig) -> BatchDataset:
    """The data of a section with data._target_. UserError where the function fails, or gives something else."""
    where = f"data._target_: {config.target}"
    if not config.is_imported:
        raise UserError(f"{where} is a Python function, which is not imported here")
    try:
        given = config.factory(**config.args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
    splits = _splits(given, where)
    first = {name: collated(samples, [0]) for name, samples in splits.items()}
    packing = Packing.of(first["train"])
    packing.pack(first["val"])
    digest = hashlib.sha256(
        f"{config.target} {config.args} {packing} {code_of_modules({config.factory.__module__})}".encode()
    )
    for samples in splits.values():
        digest.update(len(samples).to_bytes(8, "little"))
        places = np.unique(np.linspace(0, len(samples) - 1, HASHED).round().astype(int)).tolist()
        with drawing(0, 0):
            digest.update(packing.pack(collated(samples, places)).numpy().tobytes())
    counts = {f"{name}_samples": len(samples) for name, samples in splits.items()}
    facts = {"source": config.source, "split": "by the function", "fields": str(packing), **counts}
    return BatchDataset(**splits, packing=packing, vocab_size=0, hash=digest.hexdigest(), facts=facts)


def _splits(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, tuple | list) and len(given) == 2:
        given = dict(zip(SPLITS, given, strict=True))
    if not isinstance(given, Mapping) or not set(SPLITS) <= set(given):
        raise UserError(f"{where} gave {type(given).__name__}; it must give (train, val), each with len() and [i]")
    for name in SPLITS:
        samples = given[name]
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise UserError(f"{where} gave {type(samples).__name__} as {name}; it must have len() and [i]")
        if not len(samples):
            raise UserError(f"{where} gave no samples as {name}; give at least one")
    return {name: given[name] for name in SPLITS}


def collated(samples: Any, places: list[int]) -> Any:
    """The batch of the samples at these places. UserError where one cannot be read, or shapes differ."""
    read, place = [], 0
    try:
        for place in places:
            read.append(samples[place])
        return default_collate(read)
    except UserError:
        raise
    except Exception as error:
        what = f"sample {place}" if len(read) < len(places) else f"a batch of samples {places[:3]}"
        why = " ".join(str(error).split())[:200] or "no message"
        raise UserError(
            f"data._target_: {what} raised {type(error).__name__}: {why}; samples are tensors, arrays and numbers of"
            " the same shapes, or mappings, lists and tuples of these"
        ) from error


@contextmanager
def drawing(seed: int, step: int) -> Iterator[None]:
    """A context in which the generators of torch, NumPy and Python begin at (seed, step); then they are as before."""
    key, before = keyed_seed(seed, step), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        np.random.seed(key % 2**32)
        random.seed(key)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
