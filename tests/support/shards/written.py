"""Folders of shards for tests: ours written by hand, Megatron's and llm.c's by their own description."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

from hqsweep.shards.manifest import Manifest, encode_index, sealed


def write_ours(folder: Path, splits: dict[str, list], *, vocab: int = 300, separator: int = 0) -> Path:
    """Shards of one split each: {"train": [tokens, ...], "val": [...]}, one document a shard."""
    shards = {}
    for split, parts in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        shards[split] = []
        for number, tokens in enumerate(parts):
            stem = folder / split / f"{number:05}"
            data = np.asarray(tokens, "<u2")
            index = encode_index(np.dtype("<u2"), np.array([len(data)]))
            stem.with_suffix(".bin").write_bytes(data.tobytes())
            stem.with_suffix(".idx").write_bytes(index)
            shards[split].append(
                {"name": f"{split}/{number:05}", "tokens": len(data), "documents": 1, "sha256": _sha(data.tobytes()),
                 "index_sha256": _sha(index)}
            )  # fmt: skip
    write_manifest(folder, shards, vocab=vocab, separator=separator)
    return folder


def write_manifest(folder: Path, shards: dict[str, list[dict]], *, vocab: int = 300, separator: int = 0) -> None:
    listed = {split: [shard["sha256"] for shard in shards[split]] for split in ("train", "val")}
    source = dict.fromkeys(("files", "bytes", "piece_bytes", "text_bytes", "empty", "replaced", "unknown"), 0)
    source |= {"listing": "", "column": "text", "allow_unknown": 0.0}
    document = {
        "version": 1, "dtype": "uint16", "vocab_size": vocab, "separator": {"token": "<end>", "id": separator},
        "tokenizer": {"sha256": "", "library": ""}, "source": source, "val_fraction": 0.1,
        "unigram_entropy_nats": 1.5, **shards,
        "hash": _sha(json.dumps(["uint16", vocab, separator, listed]).encode()),
    }  # fmt: skip
    manifest = sealed(Manifest.model_validate_json(json.dumps(document)))
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def write_llm_c(path: Path, tokens: list, *, wide: bool = False) -> Path:
    magic, version, dtype = (20240801, 7, "<u4") if wide else (20240520, 1, "<u2")
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    path.write_bytes(head.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_megatron(path: Path, documents: list[list], *, wide: bool = False) -> Path:
    """Write documents as megatron/core/datasets/indexed_dataset.py does, one sequence each."""
    code, dtype = (4, "<i4") if wide else (8, "<u2")
    path.write_bytes(b"".join(np.asarray(each, dtype).tobytes() for each in documents))
    lengths = [len(each) for each in documents]
    first = [sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    parts = (np.array(lengths, "<i4"), np.array(first, "<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    return path


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
