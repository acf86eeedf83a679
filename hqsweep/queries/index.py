"""The tables that a query sees, from the files of runs, and an index of them, so that 10,000 runs take a second.

    runs      a row for each run: FACTS, the last value of each metric, and under dotted names every key of the config
              (train.lr) and of the manifest (manifest.device)
    metrics   a row for each run and step: FACTS, step, a column for each metric, and the dotted names
    stats, parity, calibrate, system   a row for each sampled tensor, check or time: FACTS, its columns, dotted names

<runs_dir>/.query has the rows of runs that have ended (held.py), with a mark of the files that each came from: inode,
size and times of status, config, manifest, seal and rows. A query compares every mark with its files, and reads the
rows of changed and of new runs anew; so an index is never out of date. Without the right to write there is none. Each
row is read once through its seal. A sweep outside of runs_dir has an index in its own folder.
"""

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hqsweep.config.jobs import SYSTEM, TABLES
from hqsweep.errors import Damaged, UserError
from hqsweep.queries.held import OF_TYPE, Built, Held, Shape, merged, opened, shape_of, write
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seal import FILE as SEAL
from hqsweep.sweep.store.store import known

FACTS = (
    "sweep", "run", "arm", "recipe", "seed", "job", "design", "trunk", "point", "state", "reason", "step", "steps",
    "seconds", "tokens_per_s", "run_id", "path",
)  # fmt: skip
"""The columns of a run in every table; other tables than `runs` have no step of it."""
OF_ROWS = TABLES | {"system": SYSTEM}
NAMES = ("runs", *OF_ROWS)
READ_TOGETHER = ("runs", "metrics")
PLACE = "place of the run"
"""The internal column that joins a table to `runs`: the number of the run in the order asked for."""
METRIC = "metric "
"""The beginning of the internal names of metrics."""
FILES = ("status.json", "config.yaml", "manifest.json", SEAL)
SETTLED_S = 2.0
"""The age in seconds from which the times of a file tell every change: a clock may stand still for shorter times."""
APART = ("config.seed", "config.job", "manifest.seed", "manifest.job", "manifest.arm", "manifest.run_id")
"""The dotted names that repeat a fact."""
PLACES = ("sweep", "run", "path")
"""The facts that say where a run lies; they are taken from its folder, because a sweep may be moved."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run in the order asked for: the folder of its index, its key there, and its path."""

    home: str
    key: str
    path: str


@dataclass(kw_only=True)
class _Work:
    """One table in the making: what its indexes hold, and what has to be read."""

    table: str
    files: dict[str, list[Held]]
    """Folder of the index -> its files."""
    places: list[tuple[Held, dict[int, int]]]
    """A file -> {number of a run in it: PLACE}."""
    stale: dict[int, tuple[str, float]]
    """PLACE -> (mark, time of the last change) of each run to read."""
    ended: dict[str, Built] = field(default_factory=dict)
    live: Built = field(default_factory=Built)


class Tables:
    """The tables of some runs; each is read when it is first asked for.

    done: called with the numbers of runs that were read and that have to be. root: the folder of the sweeps, which has
    the index. Raises UserError for no runs, Damaged where none can be read.
    """

    def __init__(
        self,
        runs: Iterable[RunDir],
        done: Callable[[int, int], None] = lambda number, total: None,
        root: Path | None = None,
    ) -> None:
        chosen, self._strangers = known(runs)
        if not chosen:
            raise UserError("query: no run to read; give the names of runs or sweeps, as `hqsweep ls` lists them")
        home = None if root is None else os.path.realpath(root)
        self._runs = [_placed(str(run.path), home) for run in chosen]
        self._done = done
        self._faults: dict[str, Damaged] = {}
        self._parts: dict[str, list[tuple[Held, dict[int, int]]]] = {}
        self._names: dict[str, dict[str, set[str]]] = {}
        self._mark = cache(_mark)

    @property
    def left_out(self) -> list[Any]:
        """The runs whose files cannot be trusted, as far as they were read: each a LeftOut."""
        if not self._strangers and not self._faults:
            return []
        from hqsweep.report.compare.left_out import damaged, stranger  # with pandas

        faults = [damaged(RunDir(Path(path)), fault) for path, fault in self._faults.items()]
        return [*map(stranger, self._strangers), *faults]

    def columns(self, table: str) -> tuple[list[str], list[str]]:
        """(names that `*` means, dotted names) of a table."""
        plain, dotted = self._named(table)
        return list(plain), dotted

    def _named(self, table: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """({name: (table, internal name)} of what `*` means, dotted names)."""
        dotted = [name for name in self._kinds("runs") if name not in FACTS and not name.startswith(METRIC)]
        own = OF_ROWS.get(table, {})
        if table not in ("runs", "metrics"):
            facts = [name for name in FACTS if name not in ("step", *own)]
            return {name: ("runs", name) for name in facts} | {name: (table, name) for name in own}, dotted
        plain = {name: ("runs", name) for name in FACTS} | ({"step": (table, "step")} if table == "metrics" else {})
        taken = {name.lower() for name in [*plain, *dotted]}
        for name in self._kinds(table):
            shown = name.removeprefix(METRIC)
            shown = f"metric.{shown}" if shown.lower() in taken else shown
            if name.startswith(METRIC) and shown.lower() not in taken:
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
        kinds, parts = self._kinds(table), []
        for held, places in self._of(table):
            rows = held.rows(names.values(), places, PLACE)
            columns = {name: merged(rows, own, kinds.get(own, ())) for name, own in names.items() if own not in PLACES}
            parts.append(pa.table({PLACE: rows.column(PLACE), **columns}))
        rows = pa.concat_tables(parts) if parts else pa.table({PLACE: pa.array([], pa.int32())})
        for name in names if table == "runs" else ():
            if name in PLACES:
                values = pa.array([_lies(run.path)[name] for run in self._runs], pa.string())
                rows = rows.append_column(name, pc.take(values, rows.column(PLACE)))
        return rows

    def _kinds(self, table: str) -> dict[str, set[str]]:
        """Internal name -> the kinds of its values in the runs, in the order of the first run that has it."""
        if table not in self._names:
            kinds: dict[str, set[str]] = {}
            for held, places in self._of(table):
                of_runs = [shape for *_, shape in held.runs.values()]
                for number in dict.fromkeys(of_runs[run] for run in places):
                    for name, of_run in held.shapes[number].items():
                        kinds.setdefault(name, set()).update(of_run)
            self._names[table] = kinds
        return self._names[table]

    def _of(self, table: str) -> list[tuple[Held, dict[int, int]]]:
        """The files and tables with the rows, and of each the numbers of the runs that count."""
        if table not in self._parts:
            together = READ_TOGETHER if table in READ_TOGETHER else (table,)
            work = [self._found(table)]
            if work[0].stale:  # a run is read once for both
                work += [self._found(other) for other in together if other != table and other not in self._parts]
            self._read(work)
            self._parts |= {each.table: each.places for each in work}
        if self._faults and len(self._faults) == len(self._runs):
            raise next(iter(self._faults.values()))
        return self._parts[table]

    def _found(self, table: str) -> _Work:
        """What the indexes hold of a table, and which runs have to be read."""
        files = {home: opened(Path(home), table) for home in dict.fromkeys(run.home for run in self._runs)}
        newest = {home: {key: held for held in each for key in held.runs} for home, each in files.items()}
        places: dict[int, tuple[Held, dict[int, int]]] = {}
        stale = {}
        for place, run in enumerate(self._runs):
            mark, changed = self._mark(run.path, "metrics" if table == "runs" else table)
            held = newest[run.home].get(run.key)
            number, of_rows, _ = held.runs[run.key] if held else (0, "", 0)
            if of_rows == mark:
                places.setdefault(id(held), (held, {}))[1][number] = place
            else:
                stale[place] = mark, changed
        return _Work(table=table, files=files, places=list(places.values()), stale=stale)

    def _read(self, work: Sequence[_Work]) -> None:
        """Read the runs that are stale in one of the tables; those that have ended go into its index."""
        places = sorted({place for each in work for place in each.stale})
        now = time.time()
        for number, place in enumerate(places, 1):
            run = self._runs[place]
            try:
                rows, is_sealed = _rows(run.path, work[0].table)
            except Damaged as fault:
                self._faults[run.path] = fault
            else:
                for each in work:
                    if place in each.stale:
                        self._add(each, place, rows[each.table], is_sealed and now - each.stale[place][1] > SETTLED_S)
            self._done(number, len(places))
        for each in work:
            self._keep(each)

    def _add(self, work: _Work, place: int, rows: tuple[Sequence[Any], Shape], is_settled: bool) -> None:
        """Add the rows of a run to the ones for its index, or to the ones for this query alone."""
        run = self._runs[place]
        built = work.ended.setdefault(run.home, Built()) if is_settled else work.live
        built.add(run.key if is_settled else str(place), work.stale[place][0], *rows)

    def _keep(self, work: _Work) -> None:
        """Write what was read to the indexes."""
        by_key = {(run.home, run.key): place for place, run in enumerate(self._runs)}
        for home, built in work.ended.items():
            new = built.held()
            work.places.append((new, {number: by_key[home, key] for key, (number, *_) in new.runs.items()}))
            write(Path(home), work.table, work.files[home], new, lambda key, home=home: os.path.isdir(f"{home}/{key}"))
        if work.live.runs:
            live = work.live.held()
            work.places.append((live, {number: int(key) for key, (number, *_) in live.runs.items()}))


def _placed(path: str, root: str | None) -> _Run:
    """Where a run has its rows: in the index of the sweeps' folder, or of its own sweep outside of it."""
    sweep, name = os.path.split(path)
    home, folder = _home(sweep, root)
    return _Run(home=home, key=f"{folder}{name}", path=path)


@cache
def _home(sweep: str, root: str | None) -> tuple[str, str]:
    """(folder of the index of a sweep, the beginning of its keys there)."""
    whole = os.path.realpath(sweep)
    above, name = os.path.split(whole)
    return (above, f"{name}/") if above == root else (whole, "")


def _lies(path: str) -> dict[str, str]:
    """The facts in PLACES of a run."""
    sweep, name = os.path.split(path)
    return {"sweep": os.path.basename(sweep), "run": name, "path": path}


def _rows(path: str, table: str) -> tuple[dict[str, tuple[Sequence[Mapping[str, Any]], Shape]], bool]:
    """({table: (rows, shape)} of a table and of the ones that are read with it, whether the run has ended under a
    seal). Raises Damaged."""
    from hqsweep.report.compare.frames import SealedOnce, run_row  # with pandas

    run = SealedOnce(Path(path))
    if table not in READ_TOGETHER:
        shape = {name: "fi" if kind is float else OF_TYPE[kind] for name, kind in OF_ROWS[table].items()}
        return {table: (run.rows(table), shape)}, run.sealed() is not None
    row, wide = run_row(run), _wide(run.rows("metrics"))
    facts = _facts(row, wide)
    names = dict.fromkeys(name for row in wide for name in row)
    shape = {name: "i" if name == "step" else "fi" for name in names}
    return {"runs": ([facts], shape_of(facts)), "metrics": (wide, shape)}, run.sealed() is not None


def _wide(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics with a column for each metric; of a metric that a step has twice, the later value."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        steps.setdefault(row["step"], {"step": row["step"]})[METRIC + row["metric"]] = row["value"]
    return list(steps.values())


def _facts(row: Mapping[str, Any], wide: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of `runs` from one of frames.py, and the last values of metrics."""
    facts = {name: row[name] for name in FACTS if name not in PLACES}
    for key, value in row.items():
        if key.startswith(("config.", "manifest.")) and key not in APART:
            facts.setdefault(key.removeprefix("config."), value)
    last = {name: value for at in sorted(wide, key=lambda at: at["step"]) for name, value in at.items()}
    last.pop("step", None)
    return facts | last


def _mark(folder: str, table: str) -> tuple[str, float]:
    """(mark of the files of a run, the time of the last change of one)."""
    facts, changed = [], 0
    for name in (*FILES, f"{table}.jsonl"):
        try:
            at = os.stat(f"{folder}/{name}")
        except OSError:
            facts += (0, 0, 0, 0)
        else:
            written, made = at.st_mtime_ns, at.st_ctime_ns
            facts += (at.st_ino, at.st_size, written & _WHOLE, made & _WHOLE)
            changed = max(changed, written, made)
    return hashlib.blake2b(_PACKED.pack(*facts), digest_size=12).hexdigest(), changed / 1e9


_WHOLE = 2**64 - 1
_PACKED = struct.Struct(f"{4 * (len(FILES) + 1)}Q")
