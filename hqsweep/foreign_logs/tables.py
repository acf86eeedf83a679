"""Readers of tables: CSV, JSON lines, Parquet, DataFrames, and the wide CSV that W&B exports, in pieces.

A source says which columns it has, and yields rows in pieces with a value of the metric: columns `arm`, `replicate`
(seed or trunk), `draw` (fork point), as far as there are such, `step` and `value`, both float64. An empty cell is no
value; nan and inf are values.
"""

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv
from pyarrow import json as pa_json

from hqsweep.config.safe import loads
from hqsweep.errors import UserError, nearest
from hqsweep.foreign_logs.values import USUAL, Columns

BLOCK = 16 << 20
"""The bytes of a piece of a CSV."""
ROWS = 500_000
"""The rows of a piece of any other table."""
HEAD = 16 << 20
"""The characters of JSON lines in which the names of columns are looked for."""
NO_VALUE = ["", "NA", "N/A", "null", "NULL", "None"]
"""The cells of a CSV's columns of numbers that hold none."""
LONG = ("metric", "value")
"""The columns of a table that has a row for each metric."""


class Source(Protocol):
    """A log. `where`: its name for sentences; `known`: its columns, and whether each holds numbers; `open_ended`:
    whether the names of metrics are within a column."""

    where: str
    known: Mapping[str, bool]
    open_ended: bool

    def pieces(self, columns: Columns) -> Iterator[pd.DataFrame]: ...


def piece(table: pa.Table, columns: Columns, value: str | None = None) -> pd.DataFrame:
    """The rows of a table that have a value of the metric, in the columns of a source."""
    table = table.filter(pc.is_valid(table[value or columns.metric]))
    frame = pd.DataFrame(index=range(table.num_rows))
    for name, column in columns.keys.items():
        cells = table[column].combine_chunks()
        is_text = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
        frame[name] = (cells.dictionary_encode() if is_text else cells).to_pandas()
    for name, column in (("step", columns.step), ("value", value or columns.metric)):
        frame[name] = table[column].cast(pa.float64()).to_numpy() if column else 0.0
    return frame


def long_rows(table: pa.Table, metric: str) -> pa.Table:
    """The rows of a metric, in a table that has a row for each."""
    return table.filter(pc.equal(table["metric"].cast(pa.string()), metric))


class ArrowSource:
    """A table that pyarrow reads."""

    def __init__(self, path: Path) -> None:
        self.where, self._path = str(path), path
        try:
            fields = self._fields()
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            raise self._fault(error) from None
        names = dict(fields)
        if twice := next((name for name, times in Counter(name for name, _ in fields).items() if times > 1), None):
            raise UserError(f"{self.where}: two columns are called '{twice}'; rename one")
        self.open_ended = set(LONG) <= set(names)
        self.known = {name: number for name, number in names.items() if not (self.open_ended and name in LONG)}

    def pieces(self, columns: Columns) -> Iterator[pd.DataFrame]:
        value = LONG[1] if self.open_ended and columns.metric not in self.known else None
        seen: set[str] = set()
        there = False
        try:
            for table in self._tables([*columns.read, *(LONG if value else [columns.metric])], columns):
                if value:
                    seen |= set(table["metric"].cast(pa.string()).unique().to_pylist())
                    table = long_rows(table, columns.metric)
                there |= table.num_rows > 0
                yield piece(table, columns, value)
        except (pa.ArrowException, OSError) as error:
            raise self._fault(error) from None
        if value and not there:
            known = ", ".join(f"'{name!s}'" for name in sorted(seen, key=str)[:12]) or "no row"
            raise UserError(
                f"{self.where}: no row of the metric '{columns.metric}'"
                f"{nearest(columns.metric, map(str, seen))}; it has {known}"
            )

    def _fault(self, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror and not isinstance(error, pa.ArrowException):
            return UserError(f"{self.where}: {error.strerror}")
        text = str(error).partition("\n")[0]
        if "Empty CSV" in text:
            text = "is empty"
        return UserError(f"{self.where}: {text[:300]}")

    def _fields(self) -> list[tuple[str, bool]]:
        """The columns, and whether each holds numbers."""
        raise NotImplementedError

    def _tables(self, names: Sequence[str], columns: Columns) -> Iterator[pa.Table]:
        raise NotImplementedError


def is_number(type_: pa.DataType) -> bool:
    """Whether a column of this type may be a metric; one of nulls may."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    return any(of_kind(type_) for of_kind in kinds)


class Csv(ArrowSource):
    """A CSV with commas, semicolons or tabs, also compressed."""

    def _fields(self) -> list[tuple[str, bool]]:
        with pa.input_stream(str(self._path), compression="detect") as stream:
            head = stream.read(1 << 20).decode("utf-8-sig", "replace")
        delimiter = max(",;\t", key=head.partition("\n")[0].count)
        self._parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values='"' in head)
        with self._open(csv.ConvertOptions(null_values=NO_VALUE)) as reader:
            return [(field.name, is_number(field.type)) for field in reader.schema]

    def _open(self, convert: csv.ConvertOptions) -> csv.CSVStreamingReader:
        read = csv.ReadOptions(block_size=BLOCK)
        return csv.open_csv(str(self._path), read_options=read, parse_options=self._parse, convert_options=convert)

    def _tables(self, names: Sequence[str], columns: Columns) -> Iterator[pa.Table]:
        text = pa.dictionary(pa.int32(), pa.string())
        types = {name: text for name in names if name in (*columns.keys.values(), LONG[0])}
        types |= {name: pa.float64() for name in names if name not in types}
        options = csv.ConvertOptions(include_columns=names, column_types=types, null_values=NO_VALUE)
        with self._open(options) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])


class Parquet(ArrowSource):
    """A Parquet file."""

    def _fields(self) -> list[tuple[str, bool]]:
        return [(field.name, is_number(field.type)) for field in pq.ParquetFile(self._path).schema_arrow]

    def _tables(self, names: Sequence[str], columns: Columns) -> Iterator[pa.Table]:
        with pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(batch_size=ROWS, columns=names):
                yield pa.Table.from_batches([batch])


class Frame(ArrowSource):
    """A DataFrame. With a column of steps NaN is no value: pandas has it where nothing was logged."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame.rename(columns=str)
        super().__init__(Path("the DataFrame"))

    def _fields(self) -> list[tuple[str, bool]]:
        types = zip(self._frame.columns, self._frame.dtypes, strict=True)
        numeric, boolean = pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype
        return [(name, numeric(dtype) and not boolean(dtype)) for name, dtype in types]

    def _tables(self, names: Sequence[str], columns: Columns) -> Iterator[pa.Table]:
        *others, metric = names
        frame = self._frame[list(dict.fromkeys(others))]
        mixed = {name: column.map(str, na_action="ignore") for name, column in frame.items() if column.dtype == object}
        table = pa.Table.from_pandas(frame.assign(**mixed), preserve_index=False, nthreads=1)
        try:
            values = self._frame[metric].astype("float64").to_numpy()
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.where}: '{metric}' has a value that is no number ({error})") from None
        # without a column of steps no cell belongs to a step without a log entry
        table = table.append_column(metric, pa.array(values, from_pandas=columns.step is not None))
        yield table


class JsonLines:
    """A file with a JSON object on each line, or a JSON list of objects."""

    def __init__(self, path: Path) -> None:
        self.where, self._path, self._is_list = str(path), path, False
        self._kinds: dict[str, set[type]] = {}
        for row in self._rows(HEAD):
            for name, cell in row.items():
                if cell is not None:
                    self._kinds.setdefault(name, set()).add(type(cell))
        self.known = {name: kinds <= {int, float} for name, kinds in self._kinds.items()}
        if not self.known:
            raise UserError(f"{self.where}: is empty")
        self.open_ended = set(LONG) <= set(self.known)
        if self.open_ended:
            self.known = {name: number for name, number in self.known.items() if name not in LONG}

    def pieces(self, columns: Columns) -> Iterator[pd.DataFrame]:
        keys = columns.keys
        step, value, picks = columns.step, columns.metric, False
        if self.open_ended and value not in self.known:
            value, picks = LONG[1], True
        schema = self._types_of([*keys.values(), *([LONG[0]] if picks else [])], [value, *([step] if step else [])])

        def frames(rows: Iterable[Mapping[str, Any]]) -> Iterator[pd.DataFrame]:
            rows = (row for row in rows if row.get(value) is not None)
            rows = (row for row in rows if not picks or row.get(LONG[0]) == columns.metric)
            cells = (
                (*(row.get(key) for key in keys.values()), row.get(step) if step else 0.0, row[value]) for row in rows
            )
            while block := list(islice(cells, ROWS)):
                frame = pd.DataFrame(block, columns=[*keys, "step", "value"])
                for name in ("step", "value"):
                    frame[name] = self._floats(frame[name], step if name == "step" else value)
                yield frame

        if schema is None:
            yield from frames(self._rows())
            return
        with _text(self._path) as text:
            number = 1
            while lines := text.readlines(BLOCK):
                table = _parsed(lines, schema)
                if table is None:
                    yield from frames(self._object(line, at) for at, line in enumerate(lines, number) if line.strip())
                else:
                    yield piece(long_rows(table, columns.metric) if picks else table, columns, value)
                number += len(lines)

    def _types_of(self, keys: Sequence[str], numbers: Sequence[str]) -> pa.Schema | None:
        """The types of columns, for pyarrow, which is four times as fast as json; None for a list, or keys of several
        kinds."""
        types = {frozenset([str]): pa.string(), frozenset([int]): pa.int64()}
        kinds = {key: types.get(frozenset(self._kinds.get(key, ()))) for key in keys}
        if self._is_list or None in kinds.values():
            return None
        return pa.schema([*kinds.items(), *((name, pa.float64()) for name in numbers)])

    def _floats(self, cells: pd.Series, name: str | None) -> pd.Series:
        try:
            return cells.astype("float64")
        except (TypeError, ValueError):
            wrong = next(cell for cell in cells if type(cell) not in (int, float) and cell is not None)
            raise UserError(f"{self.where}: '{name!s}' has {repr(wrong)[:80]}, which is no number") from None

    def _rows(self, most: int | None = None) -> Iterator[dict[str, Any]]:
        """The objects, of the first `most` characters or of all."""
        try:
            with _text(self._path) as lines:
                first = next((line for line in lines if line.strip()), "")
                if first.lstrip().startswith("["):
                    self._is_list = True
                    for place, row in enumerate(loads(first + lines.read()), 1):
                        yield self._checked(row, f"entry {place}")
                    return
                read = 0
                for number, line in enumerate(_with(first, lines), 1):
                    read += len(line)
                    if line.strip():
                        yield self._object(line, number)
                    if most and read > most:
                        return
        except UserError:  # which is a ValueError, too
            raise
        except ValueError as error:
            raise UserError(f"{self.where}: is no JSON ({error})") from None

    def _object(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = loads(line)
        except ValueError as error:
            raise UserError(f"{self.where}: line {number} is no JSON ({error})") from None
        return self._checked(row, f"line {number}")

    def _checked(self, row: Any, where: str) -> dict[str, Any]:
        if type(row) is not dict:
            raise UserError(f'{self.where}: {where} is no object, as {{"arm": "bf16", "seed": 0}} is')
        return row


def _parsed(lines: Sequence[str], schema: pa.Schema) -> pa.Table | None:
    """The rows of lines of JSON; None where pyarrow refuses one."""
    options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        return pa_json.read_json(pa.BufferReader("".join(lines).encode()), parse_options=options)
    except pa.ArrowException:
        return None


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as text:
            yield text
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
        raise UserError(f"{path}: is no text in UTF-8") from None


def _with(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


class WideCsv:
    """The CSV that W&B exports from a chart: a column of steps, and "RUN - METRIC" for each run."""

    def __init__(self, table: Csv) -> None:
        self.where, self.open_ended, self._table = table.where, False, table
        self._runs: dict[str, dict[str, str]] = {}
        for column in table.known:
            run, dash, metric = column.rpartition(" - ")
            if dash and not metric.endswith(("__MIN", "__MAX")):
                self._runs.setdefault(metric, {})[run] = column
        self._step = next(iter(table.known))
        self.known = {"run": False, "step": True, **dict.fromkeys(self._runs, True)}

    @classmethod
    def is_one(cls, table: Csv) -> bool:
        """Whether a table is wide: no column of arms, and one of a run."""
        usual = {name.strip().casefold() for name in table.known} & set(USUAL["arm"])
        return not usual and any(" - " in name for name in table.known)

    def pieces(self, columns: Columns) -> Iterator[pd.DataFrame]:
        for run, column in self._runs[columns.metric].items():
            own = Columns(arm=None, seed=None, step=self._step, trunk=None, point=None, metric=column)
            for rows in self._table.pieces(own):
                yield rows.assign(arm=run)
