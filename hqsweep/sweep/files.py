"""Files that survive a kill at any instant.

JSON documents are replaced as a whole (temporary file, then rename, so a reader sees the old or the new one).
Rows are JSONL: appended a write at a time, and whatever follows the last newline (a torn tail) is no row.
NaN and infinity are written as JSON's NaN, Infinity and -Infinity, which Python reads back.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hqsweep.errors import UserError


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically. The process id keeps two writers off each other's temporary file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, document: Any) -> None:
    """Replace `path` by the indented JSON of `document` atomically."""
    write_bytes(path, encode_json(document))


def encode_json(document: Any) -> bytes:
    """Indented JSON, NaN and infinity as the module says."""
    return (json.dumps(document, indent=2) + "\n").encode()


def read_json(path: Path, default: Any = None) -> Any:
    """The document in `path`, or `default` where there is no such file. Raises UserError for a file that is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); restore the file or delete its run folder") from None


def encode_rows(rows: Iterable[dict[str, Any]]) -> bytes:
    """One JSON line per row; numpy and torch scalars become floats."""
    return "".join(json.dumps(row, default=float) + "\n" for row in rows).encode()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, in file order; [] where there is no such file; a torn last line is dropped.

    Raises UserError, with the line's number, when a line before the last one is no JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        return json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        raise UserError(f"{path}: line {number} is not JSON; delete it, or repeat the run with --force") from None


def drop_torn_tail(path: Path) -> None:
    """Cut `path`, if it exists, after its last newline, so that the next append starts a line of its own."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
