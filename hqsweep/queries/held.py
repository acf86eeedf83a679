"""Rows of many runs in Parquet files: the index of a folder of sweeps.

    .query/<table>.<number>.parquet    a column `run`, the number of the run in the file, and typed columns "name|kind"

A key of the config can be text in one run and a number in another. Each kind has a column of its own, so that rows of
all sweeps stand in one file, and merged() gives the types that the chosen runs have, whatever else lies beside them.
The schema's metadata has the runs: keys, marks and shapes (which names a run has, of which kinds). New rows go to a new
file, and rows of a run in it replace the ones of earlier files; MANY files become one.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hqsweep import __version__
from hqsweep.config.safe import loads
from hqsweep.host import write_whole
from hqsweep.sweep.store.store import INDEX

RUN = "run"
MARKS = b"hqsweep.marks"
VERSION = f"2 {__version__}"
MANY = 8
CHUNK = 1000
"""The number of runs whose rows are held as Python objects."""
KINDS = {"b": pa.bool_(), "f": pa.float64(), "i": pa.int64(), "s": pa.string()}
OF_TYPE = {bool: "b", float: "f", int: "i", str: "s", type(None): "n"}
"""Type of a value -> its kind: "n" has no column, and all other values are text in JSON."""

Shape = Mapping[str, str]
"""Name of a column -> the kinds of its values in a run, such as "in" for integers and null."""


@dataclass(kw_only=True)
class Held:
    """Rows of one table: a file of the index, which stays open, or a table in memory."""

    source: pq.ParquetFile | pa.Table
    runs: Mapping[str, tuple[int, str, int]]
    """Key of a run -> (its number, the mark of its files, the number of its shape)."""
    shapes: Sequence[Shape]

    @property
    def columns(self) -> list[str]:
        """The names of the typed columns."""
        return (self.source.schema_arrow if isinstance(self.source, pq.ParquetFile) else self.source.schema).names

    def rows(self, names: Iterable[str], places: Mapping[int, int], place: str) -> pa.Table:
        """The rows of the runs whose numbers `places` maps, with the mapped numbers in the column `place`, and all
        columns of these names, "name|kind" each."""
        wanted = set(names)
        columns = [RUN, *(name for name in self.columns if name != RUN and name.rpartition("|")[0] in wanted)]
        table = self.source.read(columns) if isinstance(self.source, pq.ParquetFile) else self.source
        table = table.select(columns)  # to a file, a name with a dot is a part of another column
        mapped = pa.array([places.get(number) for number in range(len(self.runs))], pa.int32())
        table = table.append_column(place, pc.take(mapped, table.column(RUN))).drop_columns(RUN)
        return table.filter(pc.is_valid(table.column(place))) if mapped.null_count else table


@dataclass
class Built:
    """Rows of one table as they are read, run by run."""

    runs: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    shapes: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)
    _rows: list[Mapping[str, Any]] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _tables: list[pa.Table] = field(default_factory=list)

    def add(self, key: str, mark: str, rows: Sequence[Mapping[str, Any]], shape: Shape) -> None:
        """Add the rows of a run."""
        number = self.number(key, mark, shape)
        self._rows += rows
        self._numbers += [number] * len(rows)
        if number % CHUNK == CHUNK - 1:
            self._flush()

    def number(self, key: str, mark: str, shape: Shape) -> int:
        """The number of a new run."""
        shapes = self.shapes
        self.runs[key] = len(self.runs), mark, shapes.setdefault(tuple(shape.items()), len(shapes))
        return len(self.runs) - 1

    def _flush(self) -> None:
        table = typed(self._rows)
        columns = dict(zip(table.column_names, table.columns, strict=True))
        self._tables.append(pa.table({RUN: pa.array(self._numbers, pa.int32()), **columns}))
        self._rows, self._numbers = [], []

    def held(self) -> Held:
        """All rows, in memory."""
        self._flush()
        rows = pa.concat_tables(self._tables, promote_options="default")
        return Held(source=rows, runs=self.runs, shapes=[dict(shape) for shape in self.shapes])


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape of a run whose table has one row."""
    return {name: OF_TYPE.get(type(value), "s") for name, value in row.items()}


def typed(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with a column "name|kind" for each kind of value that a name has."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns |= _columns(name, values)
        except OverflowError:  # an integer of more than 64 bits
            columns |= _columns(name, [str(value) if type(value) is int else value for value in values])
    return pa.table(columns)


def _columns(name: str, values: list[Any]) -> dict[str, pa.Array]:
    kinds = sorted({OF_TYPE.get(kind, "s") for kind in set(map(type, values))} - {"n"})
    columns = {}
    for kind in kinds:
        own = values if len(kinds) == 1 else [v if OF_TYPE.get(type(v), "s") == kind else None for v in values]
        if kind == "s":
            own = [value if value is None or isinstance(value, str) else json.dumps(value) for value in own]
        columns[f"{name}|{kind}"] = pa.array(own, KINDS[kind])
    return columns


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table; a column of several kinds holds floats, or else text."""
    table, kinds = typed(rows), dict.fromkeys((name for row in rows for name in row), "")
    for name, _, kind in (column.rpartition("|") for column in table.column_names):
        kinds[name] += kind
    return pa.table({name: merged(table, name, of_name) for name, of_name in kinds.items()})


def merged(table: pa.Table, name: str, kinds: Iterable[str]) -> pa.ChunkedArray:
    """One column from the ones of a name, of a type that holds all these kinds: numbers, or else text."""
    kinds = sorted(set(kinds) - {"n"})
    one = kinds[0] if len(kinds) == 1 else "f" if kinds == ["f", "i"] else "s"
    names = [own for kind in kinds if (own := f"{name}|{kind}") in table.column_names]
    if not names:
        return pa.chunked_array([pa.nulls(len(table), KINDS[one])])
    there = [table.column(own).cast(KINDS[one]) for own in names]
    return pc.coalesce(*there) if len(there) > 1 else there[0]


def opened(home: Path, table: str) -> list[Held]:
    """The files of a table that this version can read, the oldest one first."""
    files = []
    for path in _paths(home, table):
        try:
            source = pq.ParquetFile(path)
            files.append(_described(source, loads(source.schema_arrow.metadata[MARKS])))
        except (OSError, KeyError, TypeError, ValueError, IndexError, pa.ArrowException):
            continue
    return files


def _described(source: pq.ParquetFile, document: Mapping[str, Any]) -> Held:
    if document["version"] != VERSION:
        raise ValueError
    marks = zip(document["keys"], document["marks"], document["shape"], strict=True)
    runs = {key: (number, mark, shape) for number, (key, mark, shape) in enumerate(marks)}
    return Held(source=source, runs=runs, shapes=document["shapes"])


def _paths(home: Path, table: str) -> list[Path]:
    """The files of a table, the oldest one first."""
    pattern = re.compile(rf"{table}\.(\d+)\.parquet")
    folder = home / INDEX
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = [(int(match[1]), folder / match[0]) for name in os.listdir(folder) if (match := pattern.fullmatch(name))]
    return [path for _, path in sorted(found)]


def write(home: Path, table: str, files: Sequence[Held], new: Held, is_there: Callable[[str], bool]) -> None:
    """Add rows to the index in `home`, where that can be written. files: opened(); is_there: whether the run of a key
    still lies in `home`, which decides at the end of its rows where files are joined."""
    paths = _paths(home, table)
    join = len(paths) >= MANY or len(files) < len(paths)
    rows = _joined(files, new, is_there) if join else new
    number = int(paths[-1].name.split(".")[-2]) + 1 if paths else 0
    with suppress(OSError):
        (home / INDEX).mkdir(exist_ok=True)
        if (home / INDEX).is_symlink():
            return
        write_whole(home / INDEX / f"{table}.{number}.parquet", _encoded(rows))
        for path in paths if join else ():
            path.unlink()


def _encoded(held: Held) -> bytes:
    document = {
        "version": VERSION, "keys": list(held.runs), "marks": [mark for _, mark, _ in held.runs.values()],
        "shape": [shape for *_, shape in held.runs.values()], "shapes": held.shapes,
    }  # fmt: skip
    buffer = io.BytesIO()
    table = held.source.replace_schema_metadata({MARKS: json.dumps(document).encode()})
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _joined(files: Sequence[Held], new: Held, is_there: Callable[[str], bool]) -> Held:
    """The newest rows of each run of these files, and the new rows, in memory."""
    built, tables = Built(), []
    newest = {key: held for held in (*files, new) for key in held.runs}
    for held in (*files, new):
        numbers = {}
        for key, (number, mark, shape) in held.runs.items():
            if newest[key] is held and (held is new or is_there(key)):
                numbers[number] = built.number(key, mark, held.shapes[shape])
        names = {name.rpartition("|")[0] for name in held.columns}
        tables.append(held.rows(names, numbers, "number").rename_columns({"number": RUN}))
    rows = pa.concat_tables(tables, promote_options="default")
    return Held(source=rows, runs=built.runs, shapes=[dict(shape) for shape in built.shapes])
