"""Records: what the bytes of a run's checkpoint are, and which rows were written before it.

The record step_N.json stands beside step_N.pt, or beside the folder step_N that many ranks write. It is written after
the file, and both are on the disk before anything builds on them. So a file without a record, or with other bytes than
its record says, is damaged.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hqsweep.config.safe import loads
from hqsweep.host import sync_folder

Mark = dict[str, Any]
"""The end of a table's rows: {"rows": their number, "bytes": their bytes, "sha256": their hash, in hex}."""

ANOTHER_RUN = "it is one of another run"
OTHER_DATA = "the run had read other data until then"
ANOTHER_FILE = "it is another file than it was"
ID_DIGITS = 10
"""The number of digits of a run's id at the end of its folder's name."""

FIELDS = {"file": str, "sha256": str, "bytes": int, "run": str, "data": str, "point": bool, "rows": dict}
"""The types of a Record's fields."""
MARK = {"rows": int, "bytes": int, "sha256": str}
"""The types of a Mark's fields."""


class NotAsWritten(Exception):
    """A file is missing, has no record, or differs from its record.

    The message names the file by its path within the run's folder, because the folder may move. `fault` is the rest.
    """

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path.parent.name}/{path.name}: {fault}")
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a file, or of all files of a folder together (digest_of_files).

    It has the name, the sha256 (hex), the number of bytes, the id of the run that wrote it, and the marks of its rows.
    data: the hash of the data that the run had read until then; "" in records of earlier versions. point: whether forks
    can begin from it, because it is a trunk's state at a fork point with its measurements.
    """

    file: str
    sha256: str
    bytes: int
    run: str = ""
    data: str = ""
    point: bool = False
    rows: Mapping[str, Mark] = field(default_factory=dict)


def record_path(path: Path) -> Path:
    """The path of a file's record."""
    return path.with_suffix(".json")


def write_record(path: Path, record: Record) -> None:
    """Put the record beside a file that is on the disk. From then on both survive a power cut."""
    target = record_path(path)
    partial = target.with_name(f"{target.name}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(json.dumps(asdict(record)).encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(target.parent)


def read_record(path: Path) -> Record:
    """Return the record of a file. Raises NotAsWritten if it is missing or is not a record."""
    target = record_path(path)
    try:
        record = Record(**loads(target.read_bytes()))
    except FileNotFoundError:
        raise NotAsWritten(path, f"its record {target.name} is not there") from None
    except (OSError, ValueError, TypeError):
        record = None
    if record is None or not _is_well_formed(record):
        raise NotAsWritten(path, f"its record {target.name} is not one")
    if record.file != path.name:
        raise NotAsWritten(path, f"its record {target.name} is that of {record.file}")
    return record


def _is_well_formed(record: Record) -> bool:
    types = {name: type(value) for name, value in asdict(record).items()}
    return types == FIELDS and all(
        isinstance(mark, dict) and {key: type(value) for key, value in mark.items()} == MARK
        for mark in record.rows.values()
    )


def read_recorded(path: Path, file: BinaryIO) -> Record:
    """The record of an open file, after comparing the two. The file is then at its beginning. Raises NotAsWritten."""
    record = read_record(path)
    _compare_size(path, os.fstat(file.fileno()).st_size, record)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    if digest != record.sha256:
        raise NotAsWritten(path, CHANGED)
    return record


CHANGED = "its bytes are not those that were written"


def _compare_size(path: Path, size: int, record: Record) -> None:
    if size != record.bytes:
        words = "it is empty" if size == 0 else f"it has {size} bytes"
        raise NotAsWritten(path, f"{words}, and {record.bytes} were written")


Digest = tuple[str, int]
"""(sha256 in hex, number of bytes)."""


def digests_of(paths: Iterable[Path]) -> dict[str, Digest]:
    """Name of each file -> its Digest. The system is asked to drop its cache first, so that the disk is read."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
    return digests


def digest_of_files(digests: Mapping[str, Digest]) -> Digest:
    """The Digest of several files: the hash of their names and hashes, and the sum of their bytes."""
    lines = "".join(f"{name} {sha256}\n" for name, (sha256, _) in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest(), sum(size for _, size in digests.values())


def _check_folder(path: Path) -> Record:
    """The record of a folder, after comparing its files with it. Raises NotAsWritten."""
    record, files = read_record(path), sorted(path.iterdir())
    _compare_size(path, sum(file.stat().st_size for file in files), record)
    if digest_of_files(digests_of(files))[0] != record.sha256:
        raise NotAsWritten(path, CHANGED)
    return record


def fault_of(path: Path, run: str) -> str | None:
    """The fault of a run's file, as a sentence without its end; None if the run with this id wrote these bytes."""
    try:
        if check_recorded(path).run != run:
            raise NotAsWritten(path, ANOTHER_RUN)
    except NotAsWritten as error:
        return str(error)
    return None


def check_recorded(path: Path) -> Record:
    """The record of a file or folder, after comparing the two. Raises NotAsWritten where they differ, or one is
    missing."""
    try:
        if path.is_dir() and not path.suffix:
            return _check_folder(path)
        with path.open("rb") as file:
            return read_recorded(path, file)
    except FileNotFoundError:
        raise NotAsWritten(path, "it is not there") from None
    except OSError as error:
        raise NotAsWritten(path, f"it cannot be read ({error.strerror})") from None


def is_point(path: Path) -> bool:
    """Whether forks can begin from a file or folder, by its record alone."""
    try:
        return path.exists() and read_record(path).point
    except NotAsWritten:
        return False


def discard(path: Path) -> None:
    """Delete a file or folder and its record; of a link, the link."""
    for entry in (record_path(path), path):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, a file or a folder, in order of steps."""
    matches = {path: re.fullmatch(r"step_([1-9][0-9]*)(\.pt)?", path.name) for path in folder.glob("step_*")}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match))


def mark_of(data: bytes) -> Mark:
    """The Mark after these rows, which are JSON lines."""
    return {"rows": data.count(b"\n"), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def misfit(name: str, data: bytes, mark: Mark) -> str | None:
    """How the beginning of a file's rows differs from its mark, as a part of a sentence; None where they agree."""
    if mark_of(data[: mark["bytes"]]) == mark:
        return None
    rows = data.count(b"\n")
    if rows < mark["rows"]:
        return f"{name} has {rows} row{'s' * (rows != 1)}, {mark['rows']} were written before it"
    return f"the first {mark['rows']} rows of {name} are not those that were written before it"
