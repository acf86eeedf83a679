"""A piece of documents becomes one shard of each split.

Several workers do this, each with one piece at a time. concurrent.futures has no worker that ends with its parent:
after SIGKILL of the parent, processes of a spawn pool stay. It also imports the caller's main module in each of them,
so that a script without a guard starts itself again, and it does not say which signal ended a worker.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.errors import UserError, nearest
from hqsweep.shards.manifest import encode_index
from hqsweep.shards.sources import Segment, listed, open_parquet
from hqsweep.shards.tokenizer import Coverage, open_tokenizer

STRETCH_BYTES = 1 << 16
"""Documents of text files that are too long to be one are cut at the first end of a line from here on."""
ROWS = 1024


def documents(segment: Segment, column: str) -> Iterator[tuple[str, bool]]:
    """(text, whether bytes of it were no UTF-8 and became U+FFFD) of each document, in the order of the file.

    Raises:
        UserError: a line that is not a JSON object or lacks the column, or a column of Parquet without text.
    """
    if segment.format == "parquet":
        yield from ((text, False) for text in _cells(segment, column))
    elif segment.format == "jsonl":
        for at, line in _lines(segment):
            if line.strip():
                yield _value(segment, at, line, column), False
    elif segment.format == "lines":
        yield from (_decoded(line.rstrip(b"\r\n")) for _, line in _lines(segment))
    elif segment.whole:
        yield _decoded(b"".join(line for _, line in _lines(segment)))
    else:
        yield from _stretches(segment)


def _stretches(segment: Segment) -> Iterator[tuple[str, bool]]:
    held: list[bytes] = []
    length = 0
    for _, line in _lines(segment):
        held.append(line)
        length += len(line)
        if length >= STRETCH_BYTES:
            yield _decoded(b"".join(held))
            held, length = [], 0
    if held:
        yield _decoded(b"".join(held))


def _lines(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """(first byte, line with its end) of the lines that begin in the segment."""
    if segment.data is not None:
        at = segment.start
        for line in BytesIO(segment.data):
            yield at, line
            at += len(line)
        return
    with segment.path.open("rb") as file:
        at = segment.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of the line that began before
        while at < segment.stop and (line := file.readline()):
            yield at, line
            at += len(line)


def _decoded(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


def _value(segment: Segment, at: int, line: bytes, column: str) -> str:
    where = f"{segment.name}, byte {at:,}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = not line.endswith(b"\n")
        why = "the last line is cut short" if cut else f"this line is no JSON ({error})"
        raise UserError(f"{where}: {why}; JSON lines have one object a line; --format says else") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line is {type(row).__name__}, not an object; JSON lines have one object a line")
    if column not in row:
        raise UserError(f"{where}: no '{column}'{nearest(column, row)}; it has {listed(row)}; --column names one")
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: '{column}' is {type(text).__name__}, not text; --column names another")
    return text.encode(errors="replace").decode() if _has_surrogates(text) else text


def _has_surrogates(text: str) -> bool:
    """JSON may escape half of a surrogate pair, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _cells(segment: Segment, column: str) -> Iterator[str]:
    import pyarrow

    groups = list(range(segment.start, segment.stop))
    with open_parquet(segment.path, segment.name, column) as table:
        try:
            for batch in table.iter_batches(ROWS, row_groups=groups, columns=[column], use_threads=False):
                yield from (text or "" for text in batch.column(0).to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{segment.name}: damaged ({' '.join(str(error).split())}); copy it again") from None


BATCH_CHARACTERS = 1 << 20
SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all pieces of a job share. out: folder of the shards. work: folder of unfinished files.
    val_fraction: share of all documents. separator: the id after each of them. allow_unknown: the share of tokens that
    may be unknown."""

    out: Path
    work: Path
    tokenizer: Path
    separator: int
    dtype: str
    column: str
    val_fraction: float
    allow_unknown: float


class Encoder:
    """Turns pieces into shards, one after another."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tokenizer = open_tokenizer(setup.tokenizer)
        self.coverage = Coverage(self.tokenizer)
        self.below = int(setup.val_fraction * 2**64)

    def shard(self, number: int, piece: list[Segment]) -> dict[str, Any]:
        """Write train/NUMBER and val/NUMBER, .bin and .idx, and return their record.

        The record: for each split None or the fields of a Shard, and text_bytes, empty, replaced, unknown, as Source
        has them. A split without documents gets no files.

        Raises:
            UserError: documents that cannot be read, or that the tokenizer does not cover.
        """
        counts = dict.fromkeys(("text_bytes", "empty", "replaced", "unknown"), 0)
        with _Writer(self.setup, number, "train") as train, _Writer(self.setup, number, "val") as val:
            for name, batch in self._batches(piece, counts):
                for text, data, encoding in zip(*batch, self._encoded(batch[0]), strict=True):
                    ids = np.array(encoding.ids, self.setup.dtype)
                    if unknown := self.coverage.unknown(text, ids):
                        counts["unknown"] += unknown
                        self._check(name, text, counts["unknown"], train.tokens + val.tokens + len(ids))
                    (val if _draw(data) < self.below else train).add(ids)
            return counts | {"train": train.finish(), "val": val.finish()}

    def _batches(self, piece: list[Segment], counts: dict[str, int]) -> Iterator[tuple[str, tuple[list, list]]]:
        """(name of the file, (texts, their UTF-8)) of documents that are not empty, a megabyte at a time."""
        for segment in piece:
            texts: list[str] = []
            encoded: list[bytes] = []
            length = 0
            for text, replaced in documents(segment, self.setup.column):
                counts["empty"] += not text
                counts["replaced"] += replaced
                if text:
                    texts.append(text)
                    encoded.append(text.encode())
                    length += len(text)
                    counts["text_bytes"] += len(encoded[-1])
                if length >= BATCH_CHARACTERS:
                    yield segment.name, (texts, encoded)
                    texts, encoded, length = [], [], 0
            if texts:
                yield segment.name, (texts, encoded)

    def _encoded(self, texts: list[str]) -> list[Any]:
        return self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def _check(self, name: str, text: str, unknown: int, tokens: int) -> None:
        """Raise UserError if more is unknown than allowed. A share is judged after a thousand tokens."""
        if unknown > self.setup.allow_unknown * max(tokens, 1000):
            missed = self.coverage.example(text)[:SHOWN]
            points = " ".join(f"U+{ord(character):04X}" for character in missed[:4])
            raise UserError(
                f"{name}: the tokenizer has no token for {missed!r} ({points}), so it does not cover this text; give a"
                " byte-level one, or allow a share of unknown tokens with --allow-unknown"
            )


def _draw(data: bytes) -> int:
    """A number below 2**64 that depends on the text alone: a document stays in its split when others are added."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class _Writer:
    """The shard of a split: written in the folder of work, and moved to its place when it is whole."""

    def __init__(self, setup: Setup, number: int, split: str) -> None:
        self.setup, self.name = setup, f"{split}/{number:05}"
        self.separator = np.array([setup.separator], setup.dtype)
        self.paths = {end: setup.work / f"{number:05}.{split}.{end}" for end in ("bin", "idx")}
        self.digest, self.lengths, self.tokens = hashlib.sha256(), [], 0

    def __enter__(self) -> "_Writer":
        self.file = self.paths["bin"].open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def add(self, ids: np.ndarray) -> None:
        """One document, and the separator after it."""
        data = ids.tobytes() + self.separator.tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.lengths.append(len(ids) + 1)
        self.tokens += len(ids) + 1

    def finish(self) -> dict[str, Any] | None:
        """Put the files in their places, and return the fields of a Shard; None without documents.

        Nothing waits for the disk: the caller does, before it trusts the record (prepare).
        """
        if not self.lengths:
            return None
        index = encode_index(np.dtype(self.setup.dtype), np.array(self.lengths))
        self.paths["idx"].write_bytes(index)
        self.file.close()
        for end, path in self.paths.items():
            os.replace(path, self.setup.out / f"{self.name}.{end}")
        return {
            "name": self.name, "tokens": self.tokens, "documents": len(self.lengths),
            "sha256": self.digest.hexdigest(), "index_sha256": hashlib.sha256(index).hexdigest(),
        }  # fmt: skip


Piece = tuple[int, list[Segment]]
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def encode_all(setup: Setup, pieces: Iterator[Piece], workers: int) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """(piece, record of its shard) as they are done. A worker is started when there is a piece for it, and the next
    piece is cut while the workers are busy.

    Raises:
        UserError: what a worker refuses, or that one was killed.
        OSError: a worker cannot write.
    """
    crew: dict[Connection, subprocess.Popen] = {}
    busy: dict[Connection, Piece] = {}
    upcoming = next(pieces, None)
    try:
        while upcoming is not None or busy:
            while upcoming is not None and len(busy) < workers:
                idle = next((line for line in crew if line not in busy), None) or _hire(crew, setup)
                busy[idle] = upcoming
                _send(idle, upcoming, crew)
                upcoming = next(pieces, None)
            for line in wait(list(busy)):
                done = busy.pop(line), _answer(line, crew)
                if upcoming is not None:  # first, so that no worker waits while the caller writes what is done
                    busy[line] = upcoming
                    _send(line, upcoming, crew)
                    upcoming = next(pieces, None)
                yield done
    finally:
        for line, process in crew.items():
            line.close()
            process.kill()
            process.wait()


def _hire(crew: dict[Connection, subprocess.Popen], setup: Setup) -> Connection:
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "hqsweep.shards.worker", str(theirs.fileno())]
    crew[ours] = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | ONE_THREAD
    )
    theirs.close()
    _send(ours, setup, crew)
    return ours


def _send(line: Connection, what: Any, crew: dict[Connection, subprocess.Popen]) -> None:
    try:
        line.send(what)
    except OSError:
        raise _lost(crew[line]) from None


def _answer(line: Connection, crew: dict[Connection, subprocess.Popen]) -> dict[str, Any]:
    try:
        _, answer = line.recv()
    except (EOFError, OSError):
        raise _lost(crew[line]) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _lost(process: subprocess.Popen) -> UserError:
    code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    why = ", perhaps for want of memory: give fewer --workers" if code == -9 else ""
    return UserError(f"a worker {how}{why}; what is done is kept, and the same command goes on")
