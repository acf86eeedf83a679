"""Local rows, the source of truth: what a job puts out, appended to the run's folder as it comes.

Rows are long and tidy; config/jobs.py fixes the columns of each table, and a row with other columns is refused. A row
is on its way to the disk when the call returns (one write per call), so a killed worker loses only what it had not yet
reported. A checkpoint has the marks of the rows before it (`mark`); a run that goes on from there checks that these are
unchanged (`fits`), and drops what came after (`rewind`). Finished runs get a Parquet copy of each table.
"""

import hashlib
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hqsweep.config.jobs import TABLES
from hqsweep.errors import Damaged
from hqsweep.host import sync_folder
from hqsweep.jobs.sink import rows_until
from hqsweep.sweep.store.files import drop_torn_tail, encode_rows, read_rows
from hqsweep.sweep.store.names import run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tracker import Tracker
from hqsweep.train.record import Mark, mark_of, misfit

ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string()}

PROGRESS_EVERY_S = 0.5
"""The seconds between two writes of the progress to status.json."""


class RowFile:
    """The rows of one table: JSONL at `path`, opened by the first row, and a hash of the written rows."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self._schema = path, schema
        self._file: BinaryIO | None = None
        drop_torn_tail(path)
        self._count(self._read())

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows at the end. Raises ValueError for columns that are not the table's."""
        rows = list(rows)
        for row in rows:
            if row.keys() != set(self._schema.names):
                odd = sorted(row.keys() ^ set(self._schema.names))
                raise ValueError(f"{self.path.name}: a row has the wrong columns; missing or unknown: {', '.join(odd)}")
        if not rows:
            return
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        data = encode_rows(rows)
        left = memoryview(data)
        while left:  # a disk that fills up takes a part, and says so at the next write only
            left = left[self._file.write(left) :]
        self._rows, self._bytes = self._rows + len(rows), self._bytes + len(data)
        self._sha256.update(data)

    def mark(self, step: int | None = None) -> Mark:
        """Return the Mark of all rows, or of the rows up to `step`. They are on the disk when the call returns."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if step is None:
            return {"rows": self._rows, "bytes": self._bytes, "sha256": self._sha256.hexdigest()}
        return mark_of(encode_rows(rows_until(read_rows(self.path), step)))

    def fits(self, mark: Mark) -> str | None:
        """Return how the file's beginning differs from its mark, as a part of a sentence; None if it does not."""
        return misfit(self.path.name, self._read(), mark)

    def rewind(self, mark: Mark) -> None:
        """Drop the rows after the mark, which the file fits; if there are none before it, delete the file."""
        self.close()
        if not mark["bytes"]:
            self.path.unlink(missing_ok=True)
        elif self.path.stat().st_size > mark["bytes"]:
            os.truncate(self.path, mark["bytes"])
        self._count(self._read())

    def write_parquet(self, path: Path) -> None:
        """Write a Parquet copy of the rows, atomically; none without rows. Raises Damaged if the rows have changed."""
        if self.fits(self.mark()):
            raise Damaged(self.path, "was changed by another process while the run wrote it", "run again")
        path.unlink(missing_ok=True)
        if rows := read_rows(self.path):
            temporary = path.with_name(f".{path.name}.tmp")
            pq.write_table(pa.Table.from_pylist(rows, schema=self._schema), temporary)
            os.replace(temporary, path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _count(self, data: bytes) -> None:
        """Count these rows as written."""
        self._rows, self._bytes, self._sha256 = data.count(b"\n"), len(data), hashlib.sha256(data)


class RowSink:
    """The sink of a job's results: the run's folder first, then the tracker's mirror of it."""

    def __init__(self, run: RunDir, tracker: Tracker) -> None:
        self._run, self._tracker = run, tracker
        self._tables = {name: RowFile(run.jsonl(name), _schema(columns)) for name, columns in TABLES.items()}
        self._opened_s = time.monotonic()
        self._seconds_before: float = run.written_status()["seconds"]
        self._first: tuple[float, float] | None = None
        self._said_s = -math.inf

    @cached_property
    def run_id(self) -> str:
        """The id of the run, by which its files are known."""
        return run_id(self._run.config())

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step, one row each."""
        floats = {name: float(value) for name, value in values.items()}
        self._tables["metrics"].append({"step": step, "metric": name, "value": value} for name, value in floats.items())
        self._tracker.log(step, floats)

    def rows(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows of any other table, in the columns of TABLES."""
        rows = list(rows)
        self._tables[table].append(rows)
        if table == "stats":
            for step, sampled in groupby(rows, itemgetter("step")):
                self._tracker.sampled(step, list(sampled))

    def manifest(self, **entries: Any) -> None:
        """Add entries to the run's manifest."""
        self._run.update_manifest(**entries)

    def phase(self, phase: str | None) -> None:
        """Note the job's work outside of training steps; written at once."""
        self._run.write_status(phase=phase)

    def progress(
        self,
        step: int,
        steps: int,
        loss: float | None,
        tokens_per_s: float | None,
        *,
        part: float | None = None,
        first: int = 0,
    ) -> None:
        """Note how far the job is, for the display: written now and then, and at the last step. The time left is the
        average time of this attempt's work, times the work to go."""
        now, part = time.monotonic(), (step - first) / (steps - first) if part is None else part
        first_part, first_s = self._first = self._first or (part, now)
        if now - self._said_s < PROGRESS_EVERY_S and step < steps:
            return
        self._said_s = now
        eta_s = (now - first_s) / (part - first_part) * (1 - part) if part > first_part else None
        progress = {
            "step": step, "steps": steps, "part": part, "loss": loss, "tokens_per_s": tokens_per_s, "eta_s": eta_s,
        }  # fmt: skip
        seconds = round(self._seconds_before + now - self._opened_s, 3)
        self._run.write_status(progress=progress | ({"first": first} if first else {}), seconds=seconds)

    def mark(self, step: int | None = None) -> dict[str, Mark]:
        """Table -> Mark of its rows, or of those up to a step; the rows are on the disk when the call returns."""
        marks = {name: table.mark(step) for name, table in self._tables.items()}
        sync_folder(self._run.path)
        return {name: mark for name, mark in marks.items() if mark["rows"]}

    def fits(self, marks: Mapping[str, Mark]) -> str | None:
        """Return the first table whose beginning differs from its mark, as a part of a sentence; None if none does."""
        unknown = [f"a table '{name}' was written before it" for name in marks if name not in self._tables]
        faults = (self._tables[name].fits(mark) for name, mark in marks.items() if name in self._tables)
        return next(filter(None, (*unknown, *faults)), None)

    def rewind(self, marks: Mapping[str, Mark], step: int = -1) -> None:
        """Drop the rows after the marks of the checkpoint at `step` from which the job goes on; tables
        without a mark are emptied."""
        for name, table in self._tables.items():
            table.rewind(marks.get(name, mark_of(b"")))
        self._tracker.rewind(step)

    def repaired(self, sentence: str) -> None:
        """Print the damage and how the run continued without the damaged part, and add it to the manifest's
        "repairs"."""
        print(f"warning: {sentence}", flush=True)
        self._run.note_repair(sentence)

    def close(self) -> None:
        """Close the files: no more rows come."""
        for table in self._tables.values():
            table.close()

    def write_parquet(self) -> None:
        """Write Parquet copies of all tables that have rows."""
        for name, table in self._tables.items():
            table.write_parquet(self._run.parquet(name))


def _schema(columns: Mapping[str, type]) -> pa.Schema:
    return pa.schema({name: ARROW[kind] for name, kind in columns.items()})
