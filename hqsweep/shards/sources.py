"""The files that are read, and how they are cut into pieces.

A piece is what one worker does at a time and what becomes one shard. It consists of stretches of files, so that pieces
are a function of the source alone and not of the number of workers. Files are taken by their names. From plain files a
piece has ranges of bytes or row groups, which its worker reads; compressed ones are unpacked here, which is much faster
than tokenizing, and travel with the piece.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hqsweep.errors import UserError, nearest

Format = Literal["text", "lines", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
CODECS = {".gz": "gzip", ".zst": "zstd"}
UNPACKED = 4
"""The assumed ratio of unpacked to compressed bytes of text, which is unknown before unpacking."""
SNIFF_BYTES = 8192
WHOLE_BYTES = 1 << 20
"""A text file up to this size is one document."""
READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of the source: its name in it, its format, and how it is compressed, if it is."""

    path: Path
    name: str
    format: Format
    codec: str | None
    size: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a file: bytes [start, stop), or row groups of Parquet; or `data`, whole lines that were unpacked.

    whole: all of a text file, which is one document. weight: bytes on the disk.
    """

    path: Path
    name: str
    format: Format
    start: int
    stop: int
    weight: int
    whole: bool = False
    data: bytes | None = None


def find(source: Path, format: Format | None, without: Path) -> list[File]:
    """Return the files of a source, sorted by name: the file itself, or the visible, non-empty files in a folder.

    format: the format of all files. None: by suffix; text if a name has no known suffix and the file no early NUL byte.
    without: a folder to skip, if it lies in the source.

    Raises:
        UserError: no such source, or nothing in it to read.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist; give a file, or a folder of files")
    if source.is_file():
        files = [_file(source, source.name, format)]
        if not files[0].size:
            raise UserError(f"{source} is empty; give a file with text in it")
        if files[0].format == "text" and not _is_text(files[0]):
            raise UserError(f"{source} is no text: a NUL byte is in its first {SNIFF_BYTES} bytes; --format says else")
        return files
    files = [_file(path, name, format) for name, path in _walk(source, without.resolve())]
    kinds = {file.name: _by_suffix(file.name)[0] for file in files}
    if format in ("jsonl", "parquet"):
        files = [file for file in files if kinds[file.name] == format] or [f for f in files if kinds[f.name] is None]
    elif format is not None:
        files = [file for file in files if kinds[file.name] is None]
    files = [file for file in files if file.format not in ("text", "lines") or _is_text(file)]
    if not files:
        kind = "text, JSON lines or Parquet" if format is None else format
        raise UserError(f"{source} holds no file of {kind}; give the folder that has them, or another --format")
    return files


def piece_bytes(files: list[File]) -> int:
    """The approximate bytes of text of a piece: a 32nd of the source, from 1 MiB to 64 MiB."""
    total = sum(file.size * (UNPACKED if file.codec else 1) for file in files)
    return min(max(total // 32, 1 << 20), 64 << 20)


def pieces(files: list[File], size: int, column: str, unpacked: Path) -> Iterator[list[Segment]]:
    """Yield the whole source, in pieces of about `size` bytes of text. The same source always gives the same pieces.

    unpacked: a folder for compressed Parquet files, which cannot be read as a stream.

    Raises:
        UserError: a file of another kind than its name, or a file that ends too early.
    """
    piece: list[Segment] = []
    filled = 0
    for segment, length in (pair for file in files for pair in _segments(file, files, size, column, unpacked)):
        piece.append(segment)
        filled += length
        if filled >= size:
            yield piece
            piece, filled = [], 0
    if piece:
        yield piece


def _segments(file: File, files: list[File], size: int, column: str, unpacked: Path) -> Iterator[tuple[Segment, int]]:
    """(segment, its bytes of text) of one file."""
    whole = WHOLE_BYTES if len(files) > 1 else 0  # of a file alone there would be one document
    common: dict[str, Any] = {"path": file.path, "name": file.name, "format": file.format}
    if file.format == "parquet":
        yield from _row_groups(file, size, column, unpacked)
    elif file.codec:
        yield from _unpacked_segments(file, common, size, whole)
    elif file.format == "text" and file.size <= whole:
        yield Segment(**common, start=0, stop=file.size, weight=file.size, whole=True), file.size
    else:
        for start in range(0, file.size, size):
            stop = min(start + size, file.size)
            yield Segment(**common, start=start, stop=stop, weight=stop - start), stop - start


def _unpacked_segments(file: File, common: dict[str, Any], size: int, whole: int) -> Iterator[tuple[Segment, int]]:
    """Segments of whole lines, of about `size` bytes."""
    start, read, rest, ended = 0, 0, b"", False
    with _unpacking(file) as (stream, packed):
        while not ended:
            data, cut = bytearray(rest), 0
            while not ended and not cut:  # a line may be longer than a piece
                ended = not _fill(stream, data, size if len(data) < size else len(data) + READ_BYTES)
                cut = len(data) if ended else data.rfind(b"\n") + 1
            rest, data = bytes(data[cut:]), bytes(data[:cut])
            if not data:
                return
            alone = ended and start == 0 and file.format == "text" and len(data) <= whole
            weight, read = packed() - read, packed()
            stop = start + len(data)
            yield Segment(**common, start=start, stop=stop, weight=weight, whole=alone, data=data), len(data)
            start = stop


def _fill(stream: Any, data: bytearray, size: int) -> bool:
    """Read until data has `size` bytes; False where the stream ends before."""
    while len(data) < size:
        if not (more := stream.read(min(READ_BYTES, size - len(data)))):
            return False
        data += more
    return True


def _row_groups(file: File, size: int, column: str, unpacked: Path) -> Iterator[tuple[Segment, int]]:
    path = _unpack(file, unpacked) if file.codec else file.path
    with open_parquet(path, file.name, column) as table:
        index = table.schema_arrow.names.index(column)
        sizes = [_column_bytes(table.metadata.row_group(i), column, index) for i in range(table.num_row_groups)]
    start, held, total = 0, 0, max(sum(sizes), 1)
    for group, length in enumerate(sizes):
        held += length
        if held >= size or group == len(sizes) - 1:
            weight = file.size * held // total
            common = {"path": path, "name": file.name, "format": file.format}
            yield Segment(**common, start=start, stop=group + 1, weight=weight), held
            start, held = group + 1, 0


def _column_bytes(group: Any, column: str, index: int) -> int:
    """The bytes of a column in a row group, unpacked. Nested columns before it change its index among the chunks."""
    chunks = (group.column(i) for i in range(index, group.num_columns))
    return next(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _unpack(file: File, folder: Path) -> Path:
    """A compressed Parquet file, unpacked; it is kept, as its pieces are read one by one."""
    path = folder / f"{file.name.replace('/', '_')}.parquet"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with _unpacking(file) as (stream, _), temporary.open("wb") as out:
        while data := stream.read(READ_BYTES):
            out.write(data)
    os.replace(temporary, path)
    return path


@contextmanager
def _unpacking(file: File) -> Iterator[tuple[Any, Any]]:
    """(a stream of the unpacked bytes, a function that returns how many packed bytes it has read)."""
    import pyarrow

    raw = pyarrow.OSFile(str(file.path))
    try:
        with pyarrow.CompressedInputStream(raw, file.codec) as stream:
            yield stream, raw.tell
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{file.name}: is no whole {file.codec} file ({error}); copy it again") from None
    finally:
        raw.close()


def _file(path: Path, name: str, format: Format | None) -> File:
    kind, codec = _by_suffix(name)
    return File(path=path, name=name, format=format or kind or "text", codec=codec, size=path.stat().st_size)


def _by_suffix(name: str) -> tuple[Format | None, str | None]:
    """The (format, codec) of a name's suffixes."""
    stem, ending = os.path.splitext(name.lower())
    codec = CODECS.get(ending)
    return SUFFIXES.get(os.path.splitext(stem)[1] if codec else ending), codec


def _walk(root: Path, without: Path) -> list[tuple[str, Path]]:
    files = []
    for folder, subfolders, names in os.walk(root):
        below = Path(folder)
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and (below / n).resolve() != without]
        paths = [below / name for name in names if not name.startswith(".")]
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file() and path.stat().st_size]
    return sorted(files)


def _is_text(file: File) -> bool:
    if file.codec:
        with _unpacking(file) as (stream, _):
            return b"\0" not in stream.read(SNIFF_BYTES)
    with file.path.open("rb") as opened:
        return b"\0" not in opened.read(SNIFF_BYTES)


@contextmanager
def open_parquet(path: Path, name: str, column: str) -> Iterator[Any]:
    """The ParquetFile, whose column is there and is text.

    Raises:
        UserError: it is not.
    """
    import pyarrow
    from pyarrow import parquet, types

    try:
        table = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = " ".join(str(error).split())
        raise UserError(f"{name}: is no whole Parquet file ({why}); copy it again, or --format says else") from None
    with table:
        schema = table.schema_arrow
        if column not in schema.names:
            raise UserError(
                f"{name}: no column '{column}'{nearest(column, schema.names)}; it has {listed(schema.names)}; --column"
                " names one"
            )
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{name}: column '{column}' is {kind}, not text; --column names another")
        yield table


def listed(names: Iterable) -> str:
    """The first names, for a sentence."""
    shown = list(map(str, names))
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") or "no key"
