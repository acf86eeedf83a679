"""Documents of a shard: the .idx file beside a .bin, in the layout of Megatron's indexed datasets.

Source: megatron/core/datasets/indexed_dataset.py. b"MMIDIDX" and two zero bytes; uint64 version 1; uint8 code of the
dtype; uint64 number of sequences and of document bounds; int32 lengths in tokens, int64 first bytes of the sequences;
int64 document bounds, counted in sequences. Little-endian.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hqsweep.errors import Damaged

MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
CODES = {1: np.dtype("u1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
REMEDY = "copy it again, or prepare it anew"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What an .idx says: dtype of the tokens, number of documents, and of tokens."""

    dtype: np.dtype
    documents: int
    tokens: int


def encode_index(dtype: np.dtype, lengths: np.ndarray) -> bytes:
    """The .idx of documents that are `lengths` tokens long, each of them one sequence."""
    code = next(code for code, known in CODES.items() if known == dtype)
    lengths = np.asarray(lengths, np.int64)
    first = (np.cumsum(lengths) - lengths) * dtype.itemsize
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    head = HEAD.pack(MAGIC, 1, code, len(lengths), len(bounds))
    return head + lengths.astype("<i4").tobytes() + first.astype("<i8").tobytes() + bounds.tobytes()


def read_index(path: Path) -> Index:
    """The head of an .idx, and the sum of its lengths.

    Raises:
        Damaged: it is no whole index, or of a dtype that tokens do not have.
    """
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise Damaged(path, "is no index of Megatron's", "give a .bin with the .idx that was written with it")
        _, version, code, sequences, bounds = HEAD.unpack(head)
        if version != 1 or code not in CODES:
            raise Damaged(path, f"has version {version} and dtype code {code}", "version 1 and integers are read")
        if path.stat().st_size < HEAD.size + 12 * sequences + 8 * bounds:
            raise Damaged(path, "is cut short", REMEDY)
        tokens = 0
        for at in range(0, sequences, 1 << 20):
            tokens += int(np.fromfile(file, "<i4", min(1 << 20, sequences - at)).sum(dtype=np.int64))
    return Index(dtype=CODES[code], documents=max(bounds - 1, 0), tokens=tokens)
