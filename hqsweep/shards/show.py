"""What a folder of shards has: for a person and as JSON."""

from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.errors import UserError
from hqsweep.shards.manifest import SPLITS
from hqsweep.shards.reader import Shards
from hqsweep.shards.tokenizer import open_tokenizer

SAMPLE_TOKENS = 96


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
    context = min(SAMPLE_TOKENS, len(shards.train) - 1)
    if context < 1:
        return None
    ids = shards.window(0, 0, 0, batch=1, context=context)
    mark = shards.manifest.separator
    documents = np.split(ids, np.flatnonzero(ids == mark.id) + 1)
    texts = [tokenizer.decode(part[part != mark.id].tolist(), skip_special_tokens=False) for part in documents]
    return f"\n[{mark.token}]\n".join(texts)
