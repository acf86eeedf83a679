"""Files that survive a kill at any instant.

JSON documents are replaced as a whole (temporary file, then rename, so a reader sees the old or the new one).
Rows are JSONL: appended a write at a time, and whatever follows the last newline (a torn tail) is no row.
NaN and infinity are written as JSON's NaN, Infinity and -Infinity, which Python reads back.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import NAMING, OPTIONAL
from hqsweep.config.safe import loads
from hqsweep.errors import Damaged
from hqsweep.host import write_whole

REPEAT = "repeat the run with --force"
REPAIRED = "the sweep's `hqsweep run` command writes it again, and repeats the run where it has to"
LARGEST = 2**63
"""The bound of integers, as in every table that they go to."""
KINDS = {int: "an integer", float: "a number", str: "text"}
RESTORE = "restore it, or run the sweep's `hqsweep run` command again"


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) atomically."""
    write_whole(path, text.encode())


def write_json(path: Path, document: Any) -> None:
    """Replace `path` by the indented JSON of `document` atomically."""
    write_whole(path, encode_json(document))


def encode_json(document: Any) -> bytes:
    """Indented JSON, NaN and infinity as the module says."""
    return (json.dumps(document, indent=2) + "\n").encode()


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file, None where it is missing. Raises Damaged for a folder or a pipe, at which it does
    not wait, and for a file that cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(path, f"cannot be read ({error.strerror})", RESTORE) from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged(path, "is no file", RESTORE)
        parts = iter(lambda: os.read(descriptor, facts.st_size + 1), b"")
        return b"".join(parts)
    except OSError as error:
        raise Damaged(path, f"cannot be read ({error.strerror})", RESTORE) from None
    finally:
        os.close(descriptor)


def parse_json(path: Path, data: bytes) -> Any:
    """Return the document in `data`, which was read from `path`. Raises Damaged for other text than JSON."""
    try:
        return loads(data)
    except ValueError as error:
        raise Damaged(path, f"is not JSON ({error})" if data else "is empty", RESTORE) from None


def read_json(path: Path, default: Any = None) -> Any:
    """Return the document in `path`, or `default` where the file is missing. Raises Damaged for other text than
    JSON."""
    data = read_bytes(path)
    return default if data is None else parse_json(path, data)


def encode_rows(rows: Iterable[dict[str, Any]]) -> bytes:
    """One JSON line per row; numpy and torch scalars become floats."""
    return "".join(json.dumps(row, default=float) + "\n" for row in rows).encode()


def read_rows(path: Path, remedy: str = REPEAT) -> list[dict[str, Any]]:
    """Rows of a JSONL file, in file order; [] where there is no such file; a torn last line is dropped.

    Raises Damaged, with the line's number and the remedy, for a line before the last one that is not JSON.
    """
    return parse_rows(path, read_bytes(path) or b"", remedy)


def parse_rows(path: Path, data: bytes, remedy: str = REPEAT) -> list[Any]:
    """The rows in `data`, which was read from `path`; otherwise as read_rows."""
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines):
            return rows
    except (ValueError, RecursionError):
        pass
    return [_parse_line(path, number, line, remedy) for number, line in enumerate(lines, 1)]


def _parse_line(path: Path, number: int, line: bytes, remedy: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Damaged(path, f"line {number} is not JSON", remedy) from None


def check_rows(path: Path, rows: list[Any], columns: Mapping[str, type]) -> None:
    """Raise Damaged, with the line, for a row that is not a mapping, lacks a column outside of OPTIONAL, or has a value
    of another type than in `columns`. null may stand for an absent value, except in a column of NAMING."""
    if any(type(row) is not dict for row in rows):
        number = next(n for n, row in enumerate(rows, 1) if type(row) is not dict)
        raise _row_fault(path, number, f"is {shown(rows[number - 1])}, no row")
    for name, kind in columns.items():
        values = [row.get(name, ...) for row in rows]
        odd = set(map(type, values)) - _types(name, kind)
        if odd:
            number = next(n for n, value in enumerate(values, 1) if type(value) in odd)
            came = values[number - 1]
            fault = f"has no '{name}'" if came is ... else f"has {shown(came)} under '{name}'"
            raise _row_fault(path, number, f"{fault}, where {KINDS[kind]} belongs")
        if kind is str:
            unfit = {value for value in set(values) if isinstance(value, str) and not writable(value)}
        else:
            unfit = {value for value in values if type(value) is int and abs(value) >= LARGEST}
        if unfit:
            number = next(n for n, value in enumerate(values, 1) if value in unfit)
            raise _row_fault(path, number, f"has {shown(values[number - 1])} under '{name}', which no table can hold")


def _types(name: str, kind: type) -> set[type]:
    allowed: set[type] = {float, int} if kind is float else {kind}
    if name not in NAMING:
        allowed.add(type(None))
    if name in OPTIONAL:
        allowed.add(type(...))
    return allowed


def _row_fault(path: Path, number: int, fault: str) -> Damaged:
    return Damaged(path, f"line {number} {fault}", "repeat the run with --force")


def writable(text: str) -> bool:
    """Whether text can be encoded: JSON may hold one half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: Any) -> str:
    """A value for a sentence, short and in plain characters."""
    if isinstance(value, dict | list):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return "a number of more than 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def drop_torn_tail(path: Path) -> None:
    """Cut `path`, if it exists, after its last newline, so that the next append starts a new line."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def put_aside(path: Path) -> Path:
    """Rename the file or folder at `path`, and return the new name beside it. So a user's file in the way is kept."""
    aside = next(free for n in range(1, 1000) if not (free := path.with_name(f"{path.name}.aside{n}")).exists())
    return path.rename(aside)
