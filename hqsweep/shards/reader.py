"""Folders of shards, read: those that `hqsweep data prepare` wrote, Megatron's, and llm.c's.

    ours        a folder with manifest.json
    Megatron    NAME.bin with NAME.idx beside it, or a folder of such pairs
    llm.c       NAME.bin that begins with 256 int32 numbers (magic, version, tokens), or a folder of them

In a folder of others' files those whose name has "val" are the val split; where there is none, and for a single file,
the end is. Their vocabulary is read from meta.json ({"vocab_size": N}), or found by reading all tokens.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.config.safe import loads
from hqsweep.errors import Damaged, UserError
from hqsweep.shards import manifest as manifests
from hqsweep.shards.manifest import SPLITS, Manifest, read_index
from hqsweep.shards.stream import REMEDY, Part, Stream, unigram_entropy, window_starts
from hqsweep.shards.tokenizer import open_tokenizer

LLM_C = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) of llm.c's files -> dtype; source: llm.c dev/data/data_common.py."""
LLM_C_HEADER = 1024
TOKENIZER = "tokenizer.json"
"""The tokenizer's file beside our manifest."""
CHECKED_BYTES = 128 << 20
END_TOKENS, SAMPLES, SAMPLE_TOKENS = 1 << 20, 1024, 8192
"""The hashed parts of others' splits: tokens at each end, the number of pieces between, and tokens of a piece."""


@dataclass(frozen=True, kw_only=True)
class _File:
    """A .bin of another program: its tokens, and the number of its documents, if that is known."""

    part: Part
    dtype: np.dtype
    documents: int | None
    layout: str


@dataclass(frozen=True, init=False)
class Shards:
    """Tokens of both splits, on disk.

    train, val: Stream. vocab_size: all tokens are below it. layout: "hqsweep", "megatron" or "llm.c". split: in words.
    hash: SHA-256 that stands for every token of our shards, and for sizes, both ends and samples of others' splits.
    documents:
    those of both splits, where they are known. manifest: that of our shards.

    Raises:
        UserError: a path without shards, or a folder that was not prepared to its end.
        Damaged: files that are not what was written.
    """

    path: Path
    train: Stream
    val: Stream
    vocab_size: int
    layout: str
    split: str
    hash: str
    documents: dict[str, int] = field(default_factory=dict)
    manifest: Manifest | None = None

    def __init__(self, path: str | Path, *, val_fraction: float = 0.1) -> None:
        """val_fraction: the share of others' shards without a val split that becomes val."""
        path = Path(path)
        fields = _ours(path) if (path / manifests.NAME).is_file() else _others(path, val_fraction)
        for name, value in ({"path": path, "documents": {}, "manifest": None} | fields).items():
            object.__setattr__(self, name, value)

    def window(self, seed: int, step: int, row: int, *, batch: int, context: int) -> np.ndarray:
        """The context + 1 tokens that are row `row` of step `step`, int64: a pure function of its arguments. UserError
        for a negative step, and for a row beyond the batch."""
        if step < 0 or not 0 <= row < batch:
            raise UserError(f"window: step {step}, row {row} of a batch of {batch}; both begin at 0")
        return self.windows(seed, np.array([step * batch + row]), context)[0]

    def windows(self, seed: int, samples: np.ndarray, context: int) -> np.ndarray:
        """Windows of the train split, int64 [samples, context + 1]; sample number = step * batch + row."""
        return self.train.windows(window_starts(seed, samples, len(self.train), context), context + 1)

    def unigram_entropy(self) -> float:
        """The entropy of val under its own token frequencies, in nats a token."""
        return self.manifest.unigram_entropy_nats if self.manifest else unigram_entropy(self.val.chunks())

    def verify(self) -> None:
        """Read every shard of a folder with a manifest, and compare it with the manifest.

        Raises:
            Damaged: a file that was changed after it was written.
        """
        for split in SPLITS if self.manifest else ():
            for shard in getattr(self.manifest, split):
                self._compare(f"{shard.name}.bin", shard.sha256)
                self._compare(f"{shard.name}.idx", shard.index_sha256)

    def check(self) -> None:
        """Do a quick verify() for every start of a run: the sizes of all shards, the tokenizer, and CHECKED_BYTES of
        shards.

        Shards that are newer than the manifest, which is written last, are read first.

        Raises:
            Damaged: a file that was changed after it was written.
        """
        if self.manifest is None:
            return
        if (self.path / TOKENIZER).is_file():
            self._compare(TOKENIZER, self.manifest.tokenizer.sha256)
        shards = {f"{shard.name}.bin": shard for shard in (*self.manifest.train, *self.manifest.val)}
        stats = {name: (self.path / name).stat() for name in shards}
        for name, shard in shards.items():
            written = shard.tokens * self.train.dtype.itemsize
            if stats[name].st_size != written:
                raise Damaged(
                    self.path / name, f"has {stats[name].st_size:,} bytes, and {written:,} were written", REMEDY
                )
        last, left = (self.path / manifests.NAME).stat().st_mtime_ns, CHECKED_BYTES
        for name in sorted(shards, key=lambda name: (stats[name].st_mtime_ns <= last, stats[name].st_size)):
            if left <= 0:
                break
            self._compare(name, shards[name].sha256)
            left -= stats[name].st_size

    def _compare(self, name: str, sha256: str) -> None:
        """Raise Damaged unless the file has this hash."""
        file = self.path / name
        if not file.is_file() or _sha256(file) != sha256:
            raise Damaged(file, "is not what was written", REMEDY)


def _ours(folder: Path) -> dict:
    manifest = manifests.read_manifest(folder)
    dtype = manifest.numpy_dtype
    streams = {}
    for split in SPLITS:
        parts = [
            Part(path=folder / f"{shard.name}.bin", offset=0, tokens=shard.tokens) for shard in getattr(manifest, split)
        ]
        streams[split] = Stream(parts, dtype)
    words = f"by the hash of each document: {manifest.val_fraction:g} of them are val"
    documents = {split: manifest.documents(split) for split in SPLITS}
    return streams | {
        "vocab_size": manifest.vocab_size, "layout": "hqsweep", "split": words, "hash": manifest.hash,
        "documents": documents, "manifest": manifest,
    }  # fmt: skip


def _others(path: Path, val_fraction: float) -> dict:
    files = [_read_head(file) for file in _binaries(path)]
    kinds = {(file.layout, file.dtype) for file in files}
    if len(kinds) > 1:
        said = " and ".join(sorted(f"{layout} {dtype.name}" for layout, dtype in kinds))
        raise UserError(f"data.path: {path} holds shards of several kinds ({said}); give a folder for each")
    layout, dtype = kinds.pop()
    sides = {"train": [], "val": []}
    for file in files:
        sides["val" if "val" in file.part.path.stem.lower() and path.is_dir() else "train"].append(file)
    streams = {split: Stream([file.part for file in side], dtype) for split, side in sides.items()}
    words = f"by file: {len(sides['train'])} train, {len(sides['val'])} val"
    if not sides["val"] or not sides["train"]:
        whole = streams["train"] if sides["train"] else streams["val"]
        cut = len(whole) - round(len(whole) * val_fraction)
        words = f"by position: val starts at token {cut} of {len(whole)}"
        streams = {"train": whole.cut(0, cut), "val": whole.cut(cut, len(whole))}
        sides = {}
    documents = {split: sum(file.documents or 0 for file in side) for split, side in sides.items()}
    folder = path if path.is_dir() else path.parent
    return streams | {
        "vocab_size": _vocab(folder / "meta.json", streams), "layout": layout, "split": words,
        "hash": _sampled_hash(dtype, streams), "documents": documents if all(documents.values()) else {},
    }  # fmt: skip


def _binaries(path: Path) -> list[Path]:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if (path / ".prepare").is_dir():
        raise UserError(f"data.path: {path} is not finished; run its `hqsweep data prepare` again, which goes on")
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"data.path: {path} has no shards (manifest.json, or *.bin); hqsweep data prepare makes them")
    return files


def _read_head(path: Path) -> _File:
    size = path.stat().st_size
    if (beside := path.with_suffix(".idx")).is_file():
        index = read_index(beside)
        if size != index.tokens * index.dtype.itemsize:
            raise Damaged(path, f"has {size:,} bytes, and its .idx says {index.tokens:,} tokens", "copy both again")
        part = Part(path=path, offset=0, tokens=index.tokens)
        return _File(part=part, dtype=index.dtype, documents=index.documents, layout="megatron")
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, tokens = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    if (magic, version) not in LLM_C:
        raise UserError(
            f"data.path: {path} has neither an .idx beside it (Megatron) nor the header of llm.c; tokens without a"
            " header are read by data=tokens"
        )
    dtype = LLM_C[magic, version]
    if tokens < 0 or size != LLM_C_HEADER + tokens * dtype.itemsize:
        raise Damaged(path, f"has {size:,} bytes, and its header says {tokens:,} tokens", "copy it again")
    part = Part(path=path, offset=LLM_C_HEADER, tokens=tokens)
    return _File(part=part, dtype=dtype, documents=None, layout="llm.c")


def is_llm_c(path: Path) -> bool:
    """Whether a file begins like a file of llm.c."""
    with path.open("rb") as file:
        head = file.read(8)
    return len(head) == 8 and struct.unpack("<ii", head) in LLM_C


def _vocab(meta: Path, streams: dict[str, Stream]) -> int:
    if not meta.is_file():
        return 1 + max((int(chunk.max()) for stream in streams.values() for chunk in stream.chunks()), default=0)
    try:
        return int(loads(meta.read_bytes())["vocab_size"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{meta}: no "vocab_size" number in it; write {{"vocab_size": N}} or remove the file') from None


def _sampled_hash(dtype: np.dtype, streams: dict[str, Stream]) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        stream, end = streams[split], END_TOKENS
        digest.update(f"{split} {dtype.str} {len(stream)};".encode())
        digest.update(stream.read(0, min(end, len(stream))))
        if len(stream) > 2 * end + SAMPLE_TOKENS:
            for start in np.linspace(end, len(stream) - end - SAMPLE_TOKENS, SAMPLES, dtype=np.int64):
                digest.update(stream.read(int(start), SAMPLE_TOKENS))
        digest.update(stream.read(max(0, len(stream) - end), min(end, len(stream))))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SHOWN_TOKENS = 96


def facts(shards: Shards) -> dict[str, Any]:
    """JSON values: layout, vocabulary, hash, split, and for each split its tokens, bytes, files and documents."""
    said: dict[str, Any] = {
        "path": str(shards.path),
        "layout": shards.layout,
        "dtype": shards.train.dtype.name,
        "vocab_size": shards.vocab_size,
        "hash": shards.hash,
        "split": shards.split,
    }
    for split in SPLITS:
        stream = getattr(shards, split)
        said[split] = {
            "tokens": len(stream),
            "bytes": stream.nbytes,
            "files": len(stream.parts),
            "documents": shards.documents.get(split),
        }
    if (manifest := shards.manifest) is not None:
        said |= manifest.model_dump(mode="json", include={"separator", "tokenizer", "source", "unigram_entropy_nats"})
        tokens = len(shards.train) + len(shards.val)
        said["bytes_per_token"] = round(manifest.source.text_bytes / max(tokens, 1), 3)
    return said


def sample(shards: Shards) -> str | None:
    """The first window that seed 0 trains on, as text, with a line between documents; None where no tokenizer is."""
    if shards.manifest is None or not (Path(shards.path) / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = open_tokenizer(shards.path)
    except UserError:  # the library is not installed
        return None
    context = min(SHOWN_TOKENS, len(shards.train) - 1)
    if context < 1:
        return None
    ids = shards.window(0, 0, 0, batch=1, context=context)
    mark = shards.manifest.separator
    documents = np.split(ids, np.flatnonzero(ids == mark.id) + 1)
    texts = [tokenizer.decode(part[part != mark.id].tolist(), skip_special_tokens=False) for part in documents]
    return f"\n[{mark.token}]\n".join(texts)
