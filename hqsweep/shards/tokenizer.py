"""A tokenizer.json of Hugging Face: its separator, its vocabulary, and the text that it does not cover."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.config.safe import loads
from hqsweep.errors import UserError, nearest
from hqsweep.models.hf_folder import gguf_folder, is_gguf

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""The usual separators, for a tokenizer whose eos_token no file beside it names."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


def open_tokenizer(path: Path) -> Any:
    """The tokenizers.Tokenizer of a file, or of the tokenizer.json of a folder. It neither cuts nor pads, adds no
    special tokens, and reads names of special tokens in a text as text, so that no document can forge a separator.

    Raises:
        UserError: there is none, or the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("the tokenizers library is not installed; pip install 'hqsweep[models]'") from None
    path = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the library raises has no type of its own
        why = " ".join(str(error).split())
        raise UserError(f"{path} is no tokenizer.json of Hugging Face ({why}); give another --tokenizer") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_file(path: Path) -> Path:
    """The file that a path means."""
    if is_gguf(path):
        path = gguf_folder(path, "--tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--tokenizer: {file} does not exist; give a tokenizer.json, the folder that has one, or GGUF")
    return file


def vocab_size(tokenizer: Any) -> int:
    """The size of the vocabulary: all ids are below it; added tokens count."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def separator(tokenizer: Any, path: Path, wanted: str | None) -> str:
    """Return the token that follows each document: `wanted`, or the eos_token in a file beside the tokenizer.

    Without both, it is the first usual separator that the tokenizer knows.

    Raises:
        UserError: the tokenizer does not have the wanted one, or none is found.
    """
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if wanted is not None:
        if tokenizer.token_to_id(wanted) is None:
            near = nearest(wanted, special)
            raise UserError(f"--separator: the tokenizer has no token '{wanted}'{near}; {_of(special)}")
        return wanted
    stated = [_eos(tokenizer_file(path).with_name(name)) for name in BESIDE]
    usual = [token for token in (*stated, *SEPARATORS) if token and tokenizer.token_to_id(token) is not None]
    if not usual:
        raise UserError(f"the tokenizer names no end of a document; give --separator TOKEN; {_of(special)}")
    return usual[0]


def _eos(path: Path) -> str | None:
    try:
        stated = loads(path.read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    stated = stated.get("content") if isinstance(stated, dict) else stated
    return stated if isinstance(stated, str) else None


def _of(special: list[str]) -> str:
    return f"its special tokens are {', '.join(special[:8])}" if special else "it has no special tokens"


class Coverage:
    """Finds text for which a tokenizer has no token: it gives its unknown token, or nothing at all.

    Byte-level tokenizers with all bytes cover everything; this is checked once. Others have an unknown token. One
    without it drops characters, so each character is tried alone, once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        self.unknown_id = _unknown_id(tokenizer, description["model"])
        self.complete = _has_all_bytes(tokenizer, description)
        self.tried: dict[str, bool] = {}

    def unknown(self, text: str, ids: np.ndarray) -> int:
        """Return the number of unknown tokens in `ids`, or of dropped characters of `text`."""
        if self.complete:
            return 0
        if self.unknown_id is not None:
            return int(np.count_nonzero(ids == self.unknown_id))
        lost = {character for character in set(text) if not self._has(character)}
        return sum(map(text.count, lost))

    def example(self, text: str) -> str:
        """The first stretch of a text that is not covered."""
        if self.unknown_id is None:
            return next(character for character in text if not self._has(character))
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        start, stop = encoding.offsets[encoding.ids.index(self.unknown_id)]
        return text[start:stop]

    def _has(self, character: str) -> bool:
        if character not in self.tried:
            ids = self.tokenizer.encode(character, add_special_tokens=False).ids
            self.tried[character] = bool(ids) or character.isspace()
        return self.tried[character]


def _unknown_id(tokenizer: Any, model: dict[str, Any]) -> int | None:
    if model.get("unk_id") is not None:  # Unigram
        return model["unk_id"]
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)


def _has_all_bytes(tokenizer: Any, description: dict[str, Any]) -> bool:
    """Whether every byte has a token: as a letter of byte-level tokenizers, or as <0xNN> to fall back to."""
    if description["model"].get("byte_fallback"):
        return all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if '"ByteLevel"' not in json.dumps([description["pre_tokenizer"], description["normalizer"]]):
        return False
    from tokenizers.pre_tokenizers import ByteLevel

    return all(tokenizer.token_to_id(letter) is not None for letter in ByteLevel.alphabet())
