"""manifest.json: the description of a folder of shards. It is written last, so a folder that has it is whole."""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from hqsweep.errors import Damaged

NAME = "manifest.json"
VERSION = 1
WIDE = 65_500
"""The vocabulary from which on tokens are int32, as in Megatron; smaller ones have uint16."""
SPLITS = ("train", "val")


class Section(BaseModel):
    """A part of the manifest, frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(Section):
    """One pair of files NAME.bin and NAME.idx; sha256 is the hash of the .bin, index_sha256 the hash of the .idx."""

    name: str
    tokens: int
    documents: int
    sha256: str
    index_sha256: str


class Source(Section):
    """The source of the shards. bytes: size of the files. text_bytes: size of all documents in UTF-8.

    listing: SHA-256 over the names, formats and sizes of the files. times: SHA-256 over their times of change; empty in
    older manifests. piece_bytes: the approximate bytes of text of a shard. empty: documents without text, which are
    left out. replaced: documents with bytes that are not UTF-8, which became U+FFFD. unknown: tokens for text that the
    tokenizer does not cover.
    """

    files: int
    bytes: int
    listing: str
    times: str = ""
    column: str
    piece_bytes: int
    allow_unknown: float
    text_bytes: int
    empty: int
    replaced: int
    unknown: int


class Separator(Section):
    """The token after each document."""

    token: str
    id: int


class TokenizerFacts(Section):
    """The tokenizer.json that is kept beside the manifest."""

    sha256: str
    library: str


class Manifest(Section):
    """The whole manifest. hash: SHA-256 over dtype, vocabulary, separator and the hashes of the shards, so over every
    token. seal: SHA-256 over all other fields.

    unigram_entropy_nats: what the val split costs under its own token frequencies.
    """

    version: Literal[1] = VERSION
    dtype: Literal["uint16", "int32"]
    vocab_size: int
    separator: Separator
    tokenizer: TokenizerFacts
    source: Source
    val_fraction: float
    unigram_entropy_nats: float
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    hash: str
    seal: str = ""

    def tokens(self, split: str) -> int:
        """The tokens of "train" or "val", separators counted."""
        return sum(shard.tokens for shard in getattr(self, split))

    def documents(self, split: str) -> int:
        """The documents of "train" or "val"."""
        return sum(shard.documents for shard in getattr(self, split))

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of the tokens on disk."""
        return np.dtype(self.dtype).newbyteorder("<")


def token_hash(dtype: str, vocab_size: int, separator: int, shards: dict[str, list[Shard]]) -> str:
    """Return the SHA-256, in hex, of all data that a training reads."""
    listed = {split: [shard.sha256 for shard in shards[split]] for split in SPLITS}
    return hashlib.sha256(json.dumps([dtype, vocab_size, separator, listed]).encode()).hexdigest()


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its seal."""
    text = manifest.model_dump_json(exclude={"seal"})
    return manifest.model_copy(update={"seal": hashlib.sha256(text.encode()).hexdigest()})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that has one.

    Raises:
        Damaged: it is not what prepare wrote.
    """
    path = folder / NAME
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(path, f"is no manifest of shards ({where}: {first['msg']})", REMEDY) from None
    if manifest != sealed(manifest):
        raise Damaged(path, "is not what was written", REMEDY)
    outside = [shard.name for split in SPLITS for shard in getattr(manifest, split) if not _inside(shard.name)]
    if outside:
        raise Damaged(path, f"names {outside[0]!r}, which is not in its folder", REMEDY)
    return manifest


REMEDY = "copy the folder again, or prepare it anew"


def _inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
CODES = {1: np.dtype("u1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
INDEX_REMEDY = "copy it again, or prepare it anew"


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of an .idx: dtype of the tokens, number of documents, number of tokens."""

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
        Damaged: the index is incomplete, or its dtype is not a dtype of tokens.
    """
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise Damaged(path, "is no index of Megatron's", "give a .bin with the .idx that was written with it")
        _, version, code, sequences, bounds = HEAD.unpack(head)
        if version != 1 or code not in CODES:
            raise Damaged(path, f"has version {version} and dtype code {code}", "version 1 and integers are read")
        if path.stat().st_size < HEAD.size + 12 * sequences + 8 * bounds:
            raise Damaged(path, "is cut short", INDEX_REMEDY)
        tokens = 0
        for at in range(0, sequences, 1 << 20):
            tokens += int(np.fromfile(file, "<i4", min(1 << 20, sequences - at)).sum(dtype=np.int64))
    return Index(dtype=CODES[code], documents=max(bounds - 1, 0), tokens=tokens)
