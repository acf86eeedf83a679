"""Local rows, the source of truth: what a job puts out, appended to the run's folder as it comes.

Rows are long and tidy; track/tables.py fixes the columns of each table, and a row with other columns is refused. A row
is on its way to the disk when the call returns (one write per call), so a killed worker loses nothing but what it had
not said; a resumed one takes back what came after its checkpoint (`rewind`). Finished runs get a Parquet copy of each
table.
"""

import math
import os
import time
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hqsweep.sweep.files import drop_torn_tail, encode_rows, read_rows, write_bytes
from hqsweep.sweep.run_dir import RunDir
from hqsweep.track.tables import TABLES
from hqsweep.track.tracker import Tracker

ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string()}

PROGRESS_EVERY_S = 0.5
"""Seconds between two writes of the progress to status.json."""


class RowFile:
    """Rows of one table: JSONL at `path`, opened by the first row."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self._schema = path, schema
        self._file: BinaryIO | None = None
        drop_torn_tail(path)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows at the end. Raises ValueError for columns that are not the table's."""
        rows = list(rows)
        for row in rows:
            if row.keys() != set(self._schema.names):
                odd = sorted(row.keys() ^ set(self._schema.names))
                raise ValueError(f"{self.path.name}: a row has the wrong columns; missing or unknown: {', '.join(odd)}")
        if rows and self._file is None:
            self._file = self.path.open("ab", buffering=0)
        if self._file is not None:
            left = memoryview(encode_rows(rows))
            while left:  # a disk that fills up takes a part, and says so at the next write only
                left = left[self._file.write(left) :]

    def rewind(self, step: int) -> None:
        """Drop, atomically, the rows after `step`; rows of a table without steps come after every step."""
        rows = read_rows(self.path)
        earlier = [row for row in rows if row.get("step", math.inf) <= step]
        if len(earlier) < len(rows):
            self.close()
            write_bytes(self.path, encode_rows(earlier))

    def write_parquet(self, path: Path) -> None:
        """A Parquet copy of the rows, written atomically; nothing where there are no rows."""
        if rows := read_rows(self.path):
            temporary = path.with_name(f".{path.name}.tmp")
            pq.write_table(pa.Table.from_pylist(rows, schema=self._schema), temporary)
            os.replace(temporary, path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RowSink:
    """Where a job puts what it finds out: the run's folder first, then the tracker's mirror of it."""

    def __init__(self, run: RunDir, tracker: Tracker) -> None:
        self._run, self._tracker = run, tracker
        self._tables = {name: RowFile(run.jsonl(name), _schema(columns)) for name, columns in TABLES.items()}
        self._opened_s = time.monotonic()
        self._seconds_before: float = run.written_status()["seconds"]
        self._first: tuple[float, float] | None = None
        self._said_s = -math.inf

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step, one row each."""
        floats = {name: float(value) for name, value in values.items()}
        self._tables["metrics"].append({"step": step, "metric": name, "value": value} for name, value in floats.items())
        self._tracker.log(step, floats)

    def rows(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        """Rows of any other table, in the columns of TABLES."""
        rows = list(rows)
        self._tables[table].append(rows)
        if table == "stats":
            for step, sampled in groupby(rows, itemgetter("step")):
                self._tracker.sampled(step, list(sampled))

    def manifest(self, **entries: Any) -> None:
        """Add facts to the run's manifest."""
        self._run.update_manifest(**entries)

    def phase(self, phase: str | None) -> None:
        """What the job is at where that is no step of training: written at once."""
        self._run.write_status(phase=phase)

    def progress(
        self, step: int, steps: int, loss: float | None, tokens_per_s: float | None, *, part: float | None = None
    ) -> None:
        """How far the job is, for the display: written now and then, and at the last step. The time left is what the
        work of this attempt took on average, times the work to go."""
        now, part = time.monotonic(), step / steps if part is None else part
        first_part, first_s = self._first = self._first or (part, now)
        if now - self._said_s < PROGRESS_EVERY_S and step < steps:
            return
        self._said_s = now
        eta_s = (now - first_s) / (part - first_part) * (1 - part) if part > first_part else None
        self._run.write_status(
            progress={
                "step": step, "steps": steps, "part": part, "loss": loss, "tokens_per_s": tokens_per_s, "eta_s": eta_s,
            },
            seconds=round(self._seconds_before + now - self._opened_s, 3),
        )  # fmt: skip

    def rewind(self, step: int) -> None:
        """Take back the rows after `step`, the step of the checkpoint from which the job goes on."""
        for table in self._tables.values():
            table.rewind(step)
        self._tracker.rewind(step)

    def close(self) -> None:
        """No more rows."""
        for table in self._tables.values():
            table.close()

    def write_parquet(self) -> None:
        """Parquet copies of all tables that have rows."""
        for name, table in self._tables.items():
            table.write_parquet(self._run.parquet(name))


def _schema(columns: Mapping[str, type]) -> pa.Schema:
    return pa.schema({name: ARROW[kind] for name, kind in columns.items()})
