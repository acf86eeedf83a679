"""The section `data` of the config: where tokens come from."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hqsweep.config.safe_json import loads
from hqsweep.config.types import Count, Index, Positive, Section
from hqsweep.errors import UserError

TOKENS_VOCAB = 50304
"""The vocabulary that is assumed for token shards until they are read: GPT-2's, rounded up to a multiple of 64."""
LEARNT_NATS = 0.1
"""A loss this far, in nats, below the unigram entropy of the data shows that a model has learnt from context."""


class MarkovConfig(Section):
    """The synthetic source; concentration is the parameter of the Dirichlet rows, length is in tokens."""

    vocab: Annotated[int, Field(ge=2, le=65536)] = 16
    order: Count = 2
    concentration: Positive = 0.4
    seed: Index = 0
    length: Count = 1_000_000


class DataConfig(Section):
    """The source of the tokens; `path` is read by text, tokens and shards, `markov` by markov.

    hash: the hash of what the source leads to (train.data.Dataset.hash), which makes it a part of the run's id; the
    sweep's command fills it in, and refuses other data where it is given.
    """

    source: Literal["stdlib", "site", "text", "tokens", "shards", "markov"] = "stdlib"
    path: str | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    max_bytes: Count | None = None
    markov: MarkovConfig = MarkovConfig()
    hash: str | None = None

    @model_validator(mode="after")
    def _path(self) -> "DataConfig":
        if self.source in ("text", "tokens", "shards"):
            if self.path is None:
                raise UserError(f"data.path: missing; data.source={self.source} needs data.path=FILE_OR_FOLDER")
            if not Path(self.path).exists():
                raise UserError(f"data.path: '{self.path}' does not exist; it must be a file or a folder")
        elif self.path is not None:
            raise UserError(f"data.path: data.source={self.source} reads no path; add data=text, tokens or shards")
        return self

    @property
    def vocab_estimate(self) -> int:
        """The vocabulary size before the data is read: exact for bytes, markov, and shards that state it."""
        if self.source == "shards":
            path = Path(self.path)
            return _stated_vocab(path if path.is_dir() else path.parent) or TOKENS_VOCAB
        return {"markov": self.markov.vocab, "tokens": TOKENS_VOCAB}.get(self.source, 256)


def _stated_vocab(folder: Path) -> int | None:
    """The size that manifest.json or meta.json states, if there is one that can be read; other readers tell what is
    wrong with it."""
    for path in (folder / "manifest.json", folder / "meta.json"):
        if path.is_file() and (vocab := _vocab_of(path, path.stat().st_mtime_ns)):
            return vocab
    return None


@lru_cache
def _vocab_of(path: Path, written_ns: int) -> int | None:
    """The vocab_size of a JSON file as it was last written; every run of a grid asks for it."""
    try:
        return int(loads(path.read_bytes())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
