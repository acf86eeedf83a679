"""Documents of a segment: a file or a stretch of it, a line, the value of a key, or a cell of a column."""

import json
from collections.abc import Iterator
from io import BytesIO

from hqsweep.errors import UserError, nearest
from hqsweep.shards.parquet import listed, open_parquet
from hqsweep.shards.sources import Segment

STRETCH_BYTES = 1 << 16
"""Documents of text files that are too long to be one are cut at the first end of a line from here on."""
ROWS = 1024


def documents(segment: Segment, column: str) -> Iterator[tuple[str, bool]]:
    """(text, whether bytes of it were no UTF-8 and became U+FFFD) of each document, in the order of the file.

    Raises:
        UserError: a line that is no JSON object or lacks the column, or a column of Parquet that is no text.
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
