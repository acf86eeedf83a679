"""The tables that a query sees, from the files of runs, and an index of them, so that 10,000 runs take a second.

    runs      a row for each run: FACTS, the last value of each metric, and under dotted names every key of the config
              (train.lr) and of the manifest (manifest.device)
    metrics   a row for each run and step: FACTS, step, a column for each metric, and the dotted names
    stats, parity, calibrate, system   a row for each sampled tensor, check or time: FACTS, its columns, dotted names

<sweep>/.query/<table>.parquet has the rows of runs that have ended, with a mark of the files that each came from:
inode, size and times of status, config, manifest, seal and rows. Rows whose mark is not the files' mark are read anew,
so an index is never out of date; without the right to write there is none. Each row is read once through its seal.
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hqsweep import __version__
from hqsweep.config.jobs import SYSTEM, TABLES
from hqsweep.config.safe import loads
from hqsweep.errors import Damaged, UserError
from hqsweep.host import write_whole
from hqsweep.report.compare.frames import SealedOnce, run_row
from hqsweep.report.compare.left_out import LeftOut, damaged, stranger
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seal import FILE as SEAL
from hqsweep.sweep.store.store import INDEX, known

FACTS = (
    "sweep", "run", "arm", "recipe", "seed", "job", "design", "trunk", "point", "state", "reason", "step", "steps",
    "seconds", "tokens_per_s", "run_id", "path",
)  # fmt: skip
"""The columns of a run in every table; other tables than `runs` have no step of it."""
OF_ROWS = TABLES | {"system": SYSTEM}
NAMES = ("runs", *OF_ROWS)
PLACE = "place of the run"
"""The internal column that joins a table to `runs`: the number of the run in the order asked for."""
METRIC = "metric "
"""The beginning of the internal names of metrics."""
FILES = ("status.json", "config.yaml", "manifest.json", SEAL)
SETTLED_S = 2.0
"""The age in seconds from which the times of a file tell every change: a clock may stand still for shorter times."""
MARKS = b"hqsweep.marks"
VERSION = f"1 {__version__}"
APART = ("config.seed", "config.job", "manifest.seed", "manifest.job", "manifest.arm", "manifest.run_id")
"""The dotted names that repeat a fact."""


@dataclass(kw_only=True)
class _Part:
    """Rows of one table and one sweep: a file of the index, or a table in memory."""

    source: Path | pa.Table
    places: Mapping[str, int]
    """Name of a run -> PLACE. The rows of other runs do not count."""
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        of_file = isinstance(self.source, Path)
        self.names = list((pq.read_schema(self.source) if of_file else self.source.schema).names)

    def rows(self, names: Iterable[str]) -> pa.Table:
        """PLACE, and the columns of these names as far as it has them."""
        wanted = set(names)
        there = ["run", *(name for name in self.names if name in wanted and name != "run")]
        if isinstance(self.source, Path):
            table = pq.read_table(self.source, columns=there, read_dictionary=["run"])
        else:
            table = self.source.select(there)
        runs = table.column("run").combine_chunks()
        runs = runs if pa.types.is_dictionary(runs.type) else pc.dictionary_encode(runs)
        known_places = pa.array([self.places.get(name) for name in runs.dictionary.to_pylist()], pa.int32())
        table = table.drop_columns("run").append_column(PLACE, known_places.take(runs.indices))
        return table.filter(pc.is_valid(table.column(PLACE))) if known_places.null_count else table


class Tables:
    """The tables of some runs; each is read when it is first asked for.

    done: called with the numbers of runs that were read and that have to be. Raises UserError for no runs, Damaged
    where none can be read.
    """

    def __init__(self, runs: Iterable[RunDir], done: Callable[[int, int], None] = lambda number, total: None) -> None:
        self._runs, strangers = known(runs)
        if not self._runs:
            raise UserError("query: no run to read; give the names of runs or sweeps, as `hqsweep ls` lists them")
        self._done = done
        self._strangers = strangers
        self._faults: dict[Path, Damaged] = {}
        self._read: dict[Path, tuple[dict[str, Any], list[dict[str, Any]], bool]] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._mark = cache(_mark)

    @property
    def left_out(self) -> list[LeftOut]:
        """The runs whose files cannot be trusted, as far as they were read."""
        faults = [damaged(RunDir(path), fault) for path, fault in self._faults.items()]
        return [*map(stranger, self._strangers), *faults]

    def columns(self, table: str) -> tuple[list[str], list[str]]:
        """(names that `*` means, dotted names) of a table."""
        plain, dotted = self._named(table)
        return list(plain), dotted

    def _named(self, table: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """({name: (table, internal name)} of what `*` means, dotted names)."""
        of_runs = dict.fromkeys(name for part in self._of("runs") for name in part.names)
        dotted = [name for name in of_runs if name not in FACTS and not name.startswith(METRIC)]
        own = OF_ROWS.get(table, {})
        if table not in ("runs", "metrics"):
            facts = [name for name in FACTS if name not in ("step", *own)]
            return {name: ("runs", name) for name in facts} | {name: (table, name) for name in own}, dotted
        plain = {name: ("runs", name) for name in FACTS} | ({"step": (table, "step")} if table == "metrics" else {})
        taken = {name.lower() for name in [*plain, *dotted]}
        for name in dict.fromkeys(name for part in self._of(table) for name in part.names if name.startswith(METRIC)):
            shown = name.removeprefix(METRIC)
            shown = f"metric.{shown}" if shown.lower() in taken else shown
            if shown.lower() not in taken:
                taken.add(shown.lower())
                plain[shown] = (table, name)
        return plain, dotted

    def load(self, table: str, names: Sequence[str]) -> tuple[pa.Table, pa.Table | None]:
        """(columns of the runs, columns of the rows): the columns in `names`, and PLACE; None for the table `runs`."""
        plain, _ = self._named(table)
        own = {name: plain.get(name, ("runs", name)) for name in names}
        runs = self._columns("runs", {name: inner for name, (home, inner) in own.items() if home == "runs"})
        if table == "runs":
            return runs, None
        return runs, self._columns(table, {name: inner for name, (home, inner) in own.items() if home != "runs"})

    def _columns(self, table: str, names: Mapping[str, str]) -> pa.Table:
        """PLACE, and the internal columns of these names under their names."""
        rows = joined([part.rows(names.values()) for part in self._of(table)])
        columns = {PLACE: rows.column(PLACE)}
        known_facts = {"sweep": RunDir.sweep.fget, "run": RunDir.name.fget, "path": lambda run: str(run.path)}
        for name, own in names.items():
            if table == "runs" and own in known_facts:
                values = pa.array([known_facts[own](run) for run in self._runs], pa.string())
                columns[name] = pc.take(values, rows.column(PLACE))
            else:
                columns[name] = rows.column(own) if own in rows.column_names else pa.nulls(len(rows), pa.float64())
        return pa.table(columns)

    def _of(self, table: str) -> list[_Part]:
        if table not in self._parts:
            groups: dict[Path, dict[str, int]] = {}
            for place, run in enumerate(self._runs):
                groups.setdefault(run.sweep_path, {})[run.name] = place
            stale = {}
            for folder, places in groups.items():
                marks, marked = _marks(folder, table), {}
                for name in places:
                    marked[name] = self._mark(f"{folder}/{name}", "metrics" if table == "runs" else table)
                stale[folder] = {name: mark for name, mark in marked.items() if mark[0] != marks.get(name)}
            total, before = sum(map(len, stale.values())), 0
            self._parts[table] = []
            for folder, places in groups.items():
                self._parts[table] += self._parts_of(folder, table, places, stale[folder], (before, total))
                before += len(stale[folder])
        if self._faults and len(self._faults) == len(self._runs):
            raise next(iter(self._faults.values()))
        return self._parts[table]

    def _parts_of(
        self, folder: Path, table: str, places: Mapping[str, int], stale: Mapping[str, tuple[str, float]], at: Any
    ) -> list[_Part]:
        """The parts of a sweep; runs that have ended since go into the index."""
        ended, live, marks = [], [], {}
        now = time.time()
        for number, (name, (mark, changed)) in enumerate(stale.items(), at[0] + 1):
            try:
                rows, is_sealed = self._rows(RunDir(folder / name), table)
            except Damaged as fault:
                self._faults[folder / name] = fault
            else:
                settled = is_sealed and now - changed > SETTLED_S
                (ended if settled else live).extend({"run": name} | row for row in rows)
                marks |= {name: mark} if settled else {}
            self._done(number, at[1])
        kept = {name: place for name, place in places.items() if name not in stale}
        parts = [_Part(source=_path(folder, table), places=kept)] if kept else []
        if marks:
            parts = [self._indexed(folder, table, ended, marks, parts)]
            parts[0].places = {name: places[name] for name in (*kept, *marks)}
        live_rows = [_Part(source=table_of(live), places=places)] if live else []
        return [*parts, *live_rows]

    def _indexed(
        self, folder: Path, table: str, ended: list[dict[str, Any]], marks: Mapping[str, str], parts: list[_Part]
    ) -> _Part:
        """Write the index anew, with the rows of these runs after the rows of `parts`, and return all of them."""
        kept = [pq.read_table(part.source) for part in parts]
        old = _marks(folder, table)
        held = {name: old[name] for part in parts for name in part.places}
        valid = pa.array(list(held), pa.string())
        kept = [rows.filter(pc.is_in(rows.column("run"), valid)) for rows in kept]
        rows = joined([*kept, table_of(ended)])
        document = json.dumps({"version": VERSION, "marks": held | marks}).encode()
        rows = rows.replace_schema_metadata({MARKS: document})
        _write(folder, table, rows)
        return _Part(source=rows, places={})

    def _rows(self, run: RunDir, table: str) -> tuple[list[dict[str, Any]], bool]:
        """(rows of a table, whether the run has ended under a seal). Raises Damaged."""
        if table not in ("runs", "metrics"):
            sealed = SealedOnce(run.path)
            return sealed.rows(table), sealed.sealed() is not None
        if run.path not in self._read:
            sealed = SealedOnce(run.path)
            row, wide = run_row(sealed), _wide(sealed.rows("metrics"))
            self._read[run.path] = row, wide, sealed.sealed() is not None
        row, wide, has_ended = self._read[run.path]
        return ([_facts(row, wide)] if table == "runs" else wide), has_ended


def _wide(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics with a column for each metric; of a metric that a step has twice, the later value."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        steps.setdefault(row["step"], {"step": row["step"]})[METRIC + row["metric"]] = row["value"]
    return list(steps.values())


def _facts(row: Mapping[str, Any], wide: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of `runs` from one of frames.py, and the last values of metrics."""
    facts = {name: row[name] for name in FACTS if name != "run"}
    for key, value in row.items():
        if key.startswith(("config.", "manifest.")) and key not in APART:
            facts.setdefault(key.removeprefix("config."), value)
    last = {name: value for at in sorted(wide, key=lambda at: at["step"]) for name, value in at.items()}
    return facts | {name: value for name, value in last.items() if name != "step"}


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table; a column of several types becomes text."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError):
        column = pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables below each other; a column that is missing is null, and one of two types becomes text."""
    if len(tables) == 1:
        return tables[0]
    types: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for column in table.schema:
            if table.num_rows > table.column(column.name).null_count:
                types.setdefault(column.name, set()).add(column.type)
    numbers = {pa.int64(), pa.float64(), pa.int32()}
    kinds = {
        name: next(iter(kinds)) if len(kinds) == 1 else pa.float64() if kinds <= numbers else pa.string()
        for name, kinds in types.items()
    }
    cast = [
        pa.table({name: table.column(name).cast(kinds.get(name, pa.string())) for name in table.column_names})
        for table in tables
    ]
    return pa.concat_tables(cast, promote_options="default") if cast else pa.table({PLACE: pa.array([], pa.int32())})


def _mark(folder: str, table: str) -> tuple[str, float]:
    """(mark of the files of a run, the time of the last change of one)."""
    facts, changed = [], 0
    for name in (*FILES, f"{table}.jsonl"):
        try:
            at = os.stat(f"{folder}/{name}")
        except OSError:
            facts.append(None)
        else:
            facts.append((at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
            changed = max(changed, at.st_mtime_ns, at.st_ctime_ns)
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest(), changed / 1e9


def _path(folder: Path, table: str) -> Path:
    return folder / INDEX / f"{table}.parquet"


def _marks(folder: Path, table: str) -> dict[str, str]:
    """Name of a run -> the mark of its rows in the index; {} without one that this version can read."""
    try:
        document = loads((pq.read_schema(_path(folder, table)).metadata or {})[MARKS])
        return document["marks"] if document["version"] == VERSION else {}
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return {}


def _write(folder: Path, table: str, rows: pa.Table) -> None:
    """Replace the file of a table, where the folder can be written and the index is no link."""
    path, buffer = _path(folder, table), io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd")
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if not path.parent.is_symlink():
            write_whole(path, buffer.getvalue())
