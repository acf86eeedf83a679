"""What the content of data is known by: its hash, and, for files that are read while a run trains, their stamp."""

import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.config.train import DataConfig
from hqsweep.errors import UserError

WHOLE_BYTES = 256 << 20  # arrays up to this size are hashed whole
END_BYTES = 16 << 20  # of larger ones, this much at each end
SAMPLES, SAMPLE_BYTES = 1024, 16 << 10  # and as many pieces of this size, evenly spread between the ends
SHOWN_DIGITS = 10
"""The digits of a hash that a sentence shows."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of the last change (ns) and inode of each file."""


def content_hash(words: Sequence[Any], arrays: Sequence[np.ndarray]) -> str:
    """SHA-256, in hex, over words and the bytes of arrays; of an array above WHOLE_BYTES over its size, its ends and
    samples of what is between them."""
    digest = hashlib.sha256(json.dumps(words).encode())
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.nbytes};".encode())
        data = array.view(np.uint8)
        if array.nbytes > WHOLE_BYTES:
            digest.update(data[:END_BYTES])
            for start in np.linspace(END_BYTES, array.nbytes - END_BYTES - SAMPLE_BYTES, SAMPLES, dtype=np.int64):
                digest.update(data[start : start + SAMPLE_BYTES])
            data = data[-END_BYTES:]
        digest.update(data)
    return digest.hexdigest()


def how_hashed() -> str:
    """How large splits are hashed, in words."""
    return (
        f"size, first and last {END_BYTES} bytes, and {SAMPLES} pieces of {SAMPLE_BYTES} bytes between them, of a split"
        f" above {WHOLE_BYTES} bytes"
    )


def stamp_of(config: DataConfig) -> Stamp:
    """The Stamp of the files that a source with a path reads; () for others, and for files that are not there."""
    if config.path is None:
        return ()
    root = Path(config.path)
    files = root.rglob("*") if root.is_dir() else chain([root], (root.parent / "meta.json", root.with_suffix(".idx")))
    stats = []
    try:
        stats = [(str(path), path.stat()) for path in sorted(files) if path.is_file()]
    except OSError:  # one went away: whoever reads them says so
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def check_planned(config: DataConfig, known: str | None, found: str) -> None:
    """UserError where a run's data are others than they were: `known` by its plan, or by what it has read before (None:
    nothing says), `found` now; both are hashes."""
    if known is not None and known != found:
        raise UserError(
            f"{where(config)} are others than this run was planned for (hash {found[:SHOWN_DIGITS]}, and it was"
            f" {known[:SHOWN_DIGITS]}); put the old data back, or give the sweep's command with another sweep=NAME"
        )


def where(config: DataConfig) -> str:
    """The data of a source, in words that begin a sentence with the key to look at."""
    return f"data.path: the data in '{config.path}'" if config.path else f"data.source: the data of {config.source}"
