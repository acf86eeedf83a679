"""Text to make shards of, as files of every kind, and small tokenizers."""

import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def documents(count: int) -> list[str]:
    """Texts of different lengths with letters of one to four bytes."""
    return [f"Document {i}: " + f"naïve Ω😀 {i % 7}, plain words and 0x{i:x};\n" * (1 + i % 5) for i in range(count)]


def byte_level(path: Path, *, vocab: int = 400) -> Path:
    """A byte-level BPE with all bytes, which covers everything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents(50), trainer)
    tokenizer.save(str(path))
    return path


def of_letters(path: Path, *, unknown: str | None) -> Path:
    """A BPE of ASCII letters only, with an unknown token or without one, which then drops what it does not know."""
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [END] + ([unknown] if unknown else [])
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["".join(map(chr, range(33, 127)))], trainer)
    tokenizer.save(str(path))
    return path


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    """Texts as a file of the kind that its name says, compressed where it says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    if plain.suffix == ".parquet":
        parquet.write_table(pa.table({"id": range(len(texts)), column: texts}), plain, row_group_size=20)
    elif plain.suffix == ".jsonl":
        plain.write_text("".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts))
    else:
        plain.write_text("".join(texts))
    if plain != path:
        with pa.CompressedOutputStream(str(path), {".gz": "gzip", ".zst": "zstd"}[path.suffix]) as stream:
            stream.write(plain.read_bytes())
        plain.unlink()
    return path
