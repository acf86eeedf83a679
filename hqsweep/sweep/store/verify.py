"""`hqsweep verify`: every fault that the files of sweeps can show; it reads all of them.

It checks the list of runs of each sweep. Of each run it checks every sealed file, whether its id follows from its
config and its name, whether rows are in order and come once, whether Parquet copies hold the same, its checkpoints
against their records, and whether a fork started from the state that its trunk has. Which data the runs have read, and
whether these are still there, is no fault of their files, and is said beside.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from hqsweep.config.jobs import TABLES
from hqsweep.errors import Damaged
from hqsweep.host import Busy
from hqsweep.sweep.store.names import id_in, run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seen_data import SeenData, seen_by
from hqsweep.sweep.store.store import MOVE, RunStore, foreign, runs_in, seal, sweep_file
from hqsweep.train.record import ID_DIGITS, NotAsWritten, checkpoints, fault_of, read_record, record_path

ONCE = {"metrics": ["step", "metric"], "stats": ["step", "layer", "tensor", "direction"],
        "what_if": ["step", "layer", "tensor", "direction", "format"]}  # fmt: skip
"""Table -> the columns in which no two rows are alike."""


@dataclass(kw_only=True)
class Findings:
    """The number of runs that were read, their faults, the files that were sealed, and the data that they have read."""

    runs: int = 0
    data: list[SeenData] = field(default_factory=list)
    faults: list[Damaged] = field(default_factory=list)
    sealed: list[Path] = field(default_factory=list)


def verify(
    sweeps: Sequence[Path], runs: Sequence[RunDir] = (), *, keep: bool = False, done: Callable[[int, int], None]
) -> Findings:
    """Verify these sweeps with all their runs, and further runs.

    keep: seal finished runs, and sweeps, of earlier versions, which have no seal, as they are. done: called with the
    number of runs that are read, and of all.
    """
    findings, due = Findings(), list(runs)
    for folder in sweeps:
        due += _runs_of(folder, findings, keep)
    findings.data = seen_by(due)
    for number, run in enumerate(due, 1):
        if keep and _seal_as_it_is(run):
            findings.sealed.append(run.path)
        findings.faults += _faults(run)
        findings.runs += 1
        done(number, len(due))
    return findings


def _runs_of(folder: Path, findings: Findings, keep: bool) -> list[RunDir]:
    """The runs of a sweep; the faults of their list go to the findings."""
    try:
        if keep and RunStore(folder.parent).keep(folder.name):
            findings.sealed.append(folder / sweep_file.FILE)
        if not (runs := runs_in(folder)) and sweep_file.read(folder) is None:
            raise Damaged(folder / sweep_file.FILE, "is gone", sweep_file.REWRITE)
    except Damaged as fault:
        findings.faults.append(fault)
        return [RunDir(folder / name) for name in sorted(sweep_file.present(folder))]
    strangers = [
        Damaged(run.path, "is not in sweep.json, so it is no run of the sweep", MOVE) for run in foreign(folder)
    ]
    findings.faults += strangers
    return runs


def _seal_as_it_is(run: RunDir) -> bool:
    """Seal a finished run that has no seal and no visible fault; returns whether it did."""
    if (run.path / seal.FILE).exists() or not run.config_path.is_file():
        return False
    with suppress(Damaged, Busy), run.lock():
        if run.written_status()["state"] != "finished":
            return False
        run.write_status(state="finished")
        if not any(_faults(run)):
            return True
        seal.remove(run.path)
    return False


def _faults(run: RunDir) -> Iterator[Damaged]:
    """Every fault of a run; a file that has changed is not checked any further."""
    try:
        status = run.status()
        files = run.sealed()
        changed = [] if files is None else list(seal.faults(run.path, files))
        yield from changed or _contradictions(run, status["state"] == "finished")
    except Damaged as fault:
        yield fault


def _contradictions(run: RunDir, finished: bool) -> Iterator[Damaged]:
    """The contradictions between the files of a run. Raises Damaged where one cannot be read."""
    config, manifest, fork = run.config(), run.manifest(), run.fork()
    identity = run_id(config)
    if id_in(run.name) != identity[:ID_DIGITS]:
        yield Damaged(run.config_path, "is not the config whose id the folder's name ends in", seal.REPEAT)
    if manifest["run_id"] != identity:
        yield Damaged(run.manifest_path, "has another run_id than its config", seal.REPEAT)
    if (planned := (config.get("data") or {}).get("hash")) not in (None, manifest.get("data_hash", planned)):
        yield Damaged(run.manifest_path, "has another data_hash than its config", seal.REPEAT)
    for table in TABLES:
        rows = run.rows(table)
        yield from _disorder(run.jsonl(table), rows, ONCE.get(table, []))
        if finished and rows and run.parquet(table).is_file():
            yield from _other_copy(run.parquet(table), rows)
    yield from _checkpoint_faults(run, identity, finished)
    if fork is not None and not fork.is_trunk:
        yield from _trunk_faults(run, run.trunk_state(), manifest.get("trunk_sha256"))


def _disorder(path: Path, rows: list[dict[str, Any]], once: list[str]) -> Iterator[Damaged]:
    """Rows whose steps go down, and rows that are there twice."""
    if not (once and rows):
        return
    keys = pd.DataFrame({name: [row.get(name) for row in rows] for name in once})
    if not keys["step"].is_monotonic_increasing:
        line = int((keys["step"].diff() < 0).idxmax()) + 1
        yield Damaged(path, f"line {line} is of an earlier step than the line before", seal.REPEAT)
    if keys.duplicated().any():
        line = int(keys.duplicated().idxmax()) + 1
        yield Damaged(path, f"line {line} is there a second time", seal.REPEAT)


def _other_copy(path: Path, rows: list[dict[str, Any]]) -> Iterator[Damaged]:
    """A Parquet copy that does not hold the rows."""
    try:
        copy = pq.read_table(path)
        same = pa.Table.from_pylist(rows, schema=copy.schema).to_pandas().equals(copy.to_pandas())
    except (pa.ArrowException, OSError):
        same = False
    if not same:
        yield Damaged(path, "does not hold the rows of the .jsonl beside it", seal.REPEAT)


def _checkpoint_faults(run: RunDir, identity: str, finished: bool) -> Iterator[Damaged]:
    """Yield the checkpoints that differ from their records. In a finished run, a checkpoint without a record passes."""
    for path in checkpoints(run.checkpoint).values():
        if finished and not record_path(path).exists():
            continue
        if fault := fault_of(path, identity):
            yield Damaged(path, fault.partition(": ")[2], "the sweep's `hqsweep run` command does without it")


def _trunk_faults(run: RunDir, state: Path, started_from: str | None) -> Iterator[Damaged]:
    """Yield the fault of a trunk's state, if its fork started from another state."""
    with suppress(NotAsWritten):  # its own run's faults say so
        if started_from is not None and state.exists() and read_record(state).sha256 != started_from:
            yield Damaged(state, f"is not the state from which {run.name} started", "repeat the fork with --force")
