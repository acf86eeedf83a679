"""The folder of one run: every path in it, what stands there, and whose it is.

A folder belongs to one process at a time, by an flock on it, which the kernel releases however the worker dies.

Before work in a folder it is repaired: a link or a folder in the place of a file is deleted, and so is a file that
cannot be read. Both are written anew, and each repair is reported. The target of a link stays. A run that has ended is
not repaired: its seal shows the fault (RunDir.check), and the run is repeated.
"""

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import SYSTEM, TABLES
from hqsweep.config.safe import parse_yaml
from hqsweep.errors import Damaged, Missing, UserError
from hqsweep.host import Busy, is_locked, locked, write_whole
from hqsweep.sweep.store import seal
from hqsweep.sweep.store.files import (
    REPAIRED,
    check_rows,
    encode_json,
    parse_json,
    parse_rows,
    put_aside,
    read_bytes,
    write_json,
)
from hqsweep.sweep.store.names import fork_of, trunk_path
from hqsweep.train.record import NotAsWritten, checkpoints, misfit, read_record

PENDING: dict[str, Any] = {
    "state": "pending", "reason": None, "exit_code": None, "pid": None, "host": None, "attempt": 0,
    "started": None, "ended": None, "seconds": 0.0, "phase": None, "progress": None,
}  # fmt: skip
"""status.json of a run that was never started. `started` and `ended` of the last attempt are in seconds since 1970,
`seconds` is the time of all attempts together. `phase` is the run's work outside of training steps, such as "loading
data", and `progress` is {"step", "steps", "part", "loss", "tokens_per_s", "eta_s"}, part being how much of the work is
done, from 0 to 1. A fork also has "first", the step at which it leaves its trunk."""

PLANNED = ("run_id", "sweep", "arm", "seed", "job", "overrides")
"""The keys that the manifest of every run has from the beginning."""
MADE = "the sweep's `hqsweep run` command makes it again"
UNUSABLE = ("damaged", "missing")
"""The states of runs whose files cannot be trusted."""
CANCELLED = "cancelled"
"""The reason of a run that `hqsweep cancel` cancelled."""


@dataclass(frozen=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sweep_path(self) -> Path:
        return self.path.parent

    @property
    def sweep(self) -> str:
        return self.path.parent.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def lock_path(self) -> Path:
        return self.path / ".lock"

    @property
    def job_path(self) -> Path:
        """The file with the scheduler's job of the run, {"id": "12_3"}; a run without a job has no such file."""
        return self.path / "job.json"

    def jsonl(self, table: str) -> Path:
        """The file to which the rows of `table` ("metrics", "stats" or "parity") are appended."""
        return self.path / f"{table}.jsonl"

    def parquet(self, table: str) -> Path:
        """The file of the rows of `table` when the run is finished."""
        return self.path / f"{table}.parquet"

    def fork(self) -> Any:
        """The section fork of the config, a ForkConfig; None for a run from scratch to its end."""
        try:
            return fork_of(self.config())
        except Damaged:
            raise
        except ValueError as error:  # pydantic's
            why = " ".join(str(error).split())
            raise Damaged(self.config_path, f"its section fork is none: {why}", REPAIRED) from None

    def trunk_state(self) -> Path | None:
        """The checkpoint that a fork starts from, whether it exists yet or not; None for all other runs."""
        return self.fork() and trunk_path(self.config(), self.path)

    def trunk(self) -> "RunDir | None":
        """The run of this sweep that the run is a fork of; None for all other runs."""
        fork = self.fork()
        outside = fork is None or fork.is_trunk or fork.trunk_hash is not None
        return None if outside else RunDir(self.sweep_path / fork.trunk)

    def read(self, path: Path) -> bytes | None:
        """The content of one of the run's files, None where it is missing. Raises Damaged; for a run that has ended,
        also if the file has changed since."""
        data, name = self._bytes(path), os.fspath(path)[len(os.fspath(self.path)) + 1 :]
        if seal.covers(name) and path != self.status_path and (files := self.sealed()) is not None:
            seal.check(self.path, files, name, data)
        return data

    def _bytes(self, path: Path) -> bytes | None:
        """The content of a file, None where it is missing, whatever its seal says."""
        return read_bytes(path)

    def config(self) -> dict[str, Any]:
        """Return the resolved config. Raises Missing without one, Damaged for another document than the config of a
        run."""
        data = self.read(self.config_path)
        if data is None:
            raise Missing(self.path, "no config.yaml there, so this is not the folder of a run", MADE)
        try:
            config = parse_yaml(data)
        except UserError as error:
            raise Damaged(self.config_path, str(error), REPAIRED) from None
        return _checked(self.config_path, config, "config", ("job", "seed"))

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raises Damaged where it is missing, or another document."""
        manifest = self._json(self.manifest_path, "manifest", PLANNED)
        if manifest is None:
            raise Damaged(self.manifest_path, "is gone", REPAIRED)
        return manifest

    def _known_entries(self) -> dict[str, Any]:
        """The entries of the manifest, as far as it can be read."""
        with suppress(Damaged):
            return self._json(self.manifest_path, "manifest") or {}
        return {}

    def update_manifest(self, **entries: Any) -> None:
        """Add entries to the manifest; if it is missing or damaged, it has these alone."""
        write_json(self.manifest_path, self._known_entries() | entries)

    def note_repair(self, sentence: str) -> None:
        """Add a repair to the manifest: the damage, and how the run continued without the damaged part."""
        self.update_manifest(repairs=[*self._known_entries().get("repairs", []), sentence])

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The rows of `table`, or of "system", as written so far, without a torn last line. Raises Damaged for a line
        that is not a row of the table. Raises it too where no process works on the run, and its rows do not begin as at
        its newest checkpoint."""
        path = self.jsonl(table)
        data = self.read(path) or b""
        if self.checkpoint.is_dir() and self.sealed() is None and not self.is_locked():
            self._check_mark(table, data)
        rows = parse_rows(path, data)
        check_rows(path, rows, SYSTEM if table == "system" else TABLES[table])
        return rows

    def _check_mark(self, table: str, data: bytes) -> None:
        with suppress(NotAsWritten):  # the run goes on from an earlier one then
            newest = next(reversed(checkpoints(self.checkpoint).values()), None)
            mark = read_record(newest).rows.get(table) if newest else None
            if mark and (fault := misfit("it", data, mark)):
                raise Damaged(self.jsonl(table), fault.removeprefix("it "), REPAIRED)

    def job(self) -> str | None:
        """Return the id of the scheduler's job of the run, None without one. Raises Damaged."""
        document = self._json(self.job_path, "job", ("id",))
        return document and document["id"]

    def _json(self, path: Path, name: str, required: Sequence[str] = ()) -> dict[str, Any] | None:
        """The document in one of the run's files, None where it is missing. Raises Damaged."""
        return _document(path, self.read(path), name, required)

    def written_status(self) -> dict[str, Any]:
        """The content of status.json, PENDING without one. Raises Damaged."""
        return self._status_in(self.read(self.status_path))

    def _status_in(self, data: bytes | None) -> dict[str, Any]:
        return PENDING | (_document(self.status_path, data, "status", ("state",)) or {})

    def status(self) -> dict[str, Any]:
        """The written_status(), but a run whose worker died on this machine without a report is interrupted, not
        running.

        Raises Damaged where a run has ended and has changed since, as far as sizes and small files tell."""
        status = self.written_status()
        if (files := self.sealed()) is not None:
            seal.survey(self.path, files, self._bytes)
        here = status["host"] in (None, socket.gethostname())
        if status["state"] != "running" or not here or self.is_locked():
            return status
        status = self.written_status()  # again: it may have ended between the first look and the lock
        if status["state"] == "running":
            status |= {"state": "interrupted", "reason": "its worker is gone"}
        return status

    def seen(self) -> dict[str, Any]:
        """The status() for listings of many runs; where it raises, unusable()."""
        try:
            if not self.config_path.is_file():
                raise Missing(self.path, "the folder of the run, or its config, is gone", MADE)
            return self.status()
        except Damaged as fault:
            return unusable(fault)

    def has_finished(self) -> bool:
        return self.seen()["state"] == "finished"

    def write_status(self, **changes: Any) -> dict[str, Any]:
        """Change these fields of status.json and return all; a damaged file is replaced. The worker writes it, and the
        engine once the worker is dead.

        A status with which a run ends (seal.SEALED) seals all of its output; one with which it goes on, or starts
        again, deletes the seal."""
        try:
            status = self.written_status() | changes
        except Damaged:
            status = PENDING | changes
        data = encode_json(status)
        if "state" in changes and status["state"] in seal.SEALED:
            seal.write(self.path, data)
        write_whole(self.status_path, data)
        if status["state"] not in seal.SEALED:
            seal.remove(self.path)
        return status

    def lock(self, wait_s: float = 0.0) -> AbstractContextManager[Callable[[], bool]]:
        """Hold the folder, as locked() says. Raises Busy when another process still holds it after `wait_s` s."""
        return locked(self.lock_path, wait_s)

    def is_locked(self) -> bool:
        """Whether a live process holds the folder."""
        return is_locked(self.lock_path)

    def sealed(self) -> seal.Files | None:
        """The seal of a run that has ended: its files as they were. None for one that goes on, and for one that failed
        and whose seal is gone. Raises Damaged for a finished run without a seal, and for a status that is not the
        sealed one."""
        data = self._bytes(self.status_path)
        status = self._status_in(data)
        if data is not None and status["state"] not in seal.SEALED:
            return None
        files = seal.state(self.path)
        if files is not None:
            seal.check(self.path, files, self.status_path.name, data)
        elif status["state"] == "finished":
            earlier = f"`hqsweep verify --seal {self.path}` keeps a run of an earlier version as it is"
            raise Damaged(self.path / seal.FILE, "is gone", f"{seal.REPEAT}; {earlier}")
        return files

    def check(self) -> None:
        """Raise Damaged if an ended run has changed since. Reads everything except captured operands."""
        files = self.sealed()
        for fault in seal.faults(self.path, files, deep=False) if files is not None else ():
            raise fault

    def reset(self) -> None:
        """Delete the run's output, so that it is pending again. The status says this first.

        Links are deleted, but not their targets. The caller holds the lock.
        """
        manifest = self._known_entries()
        if self.path.is_symlink():
            config = self.config_path.read_bytes()
            self.path.unlink()
            self.path.mkdir()
            write_whole(self.config_path, config)
        if not self.status_path.is_file():
            remove(self.status_path)
        write_json(self.status_path, PENDING)
        remove(self.path / seal.FILE)
        for entry in self.path.iterdir():
            if entry not in (self.config_path, self.lock_path, self.status_path):
                remove(entry)
        planned = (*PLANNED, "trunk", "point")
        write_json(self.manifest_path, {key: manifest[key] for key in planned if key in manifest})


def _document(path: Path, data: bytes | None, name: str, required: Sequence[str]) -> dict[str, Any] | None:
    """The document in `data`, which was read from `path`; None for no data. Raises Damaged."""
    try:
        return None if data is None else _checked(path, parse_json(path, data), name, required)
    except RecursionError:
        raise Damaged(path, "is nested too deep", REPAIRED) from None


def _checked(path: Path, document: Any, name: str, required: Sequence[str]) -> dict[str, Any]:
    """Return check_document() of a document by its name in SCHEMAS."""
    from hqsweep.sweep.store.documents import SCHEMAS, check_document  # pydantic: a TAB, which reads none, waits not

    return check_document(path, document, SCHEMAS[name], required)


def unusable(fault: Damaged) -> dict[str, Any]:
    """The status of a run whose files cannot be used: its state is "missing" or "damaged", and its reason says why."""
    return PENDING | {"state": "missing" if isinstance(fault, Missing) else "damaged", "reason": str(fault)}


def remove(path: Path) -> None:
    """Delete a file, a link (never its target) or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


FILES = (
    "config.yaml", "manifest.json", "status.json", "job.json", "log.txt", seal.FILE,
    *(f"{table}.{ending}" for table in TABLES for ending in ("jsonl", "parquet")),
)  # fmt: skip
FOLDERS = ("checkpoint", seal.CAPTURED)


def repair(run: RunDir, say: Callable[[str], None]) -> None:
    """Repair the folder of an unfinished run, unless a process works in it. The caller then writes config, manifest and
    status where they are missing. Raises Damaged for a folder in the place of the lock."""
    place = _clear(run.path) if run.path.is_symlink() or run.path.exists() else None
    if place:
        say(f"{run.name}: {place}")
    if not run.path.is_dir():
        return
    with suppress(Busy), run.lock():
        if run.seen()["state"] == "finished":
            return
        said = list(_misplaced(run))
        if not (run.path / seal.FILE).exists():
            said += _unreadable(run)
            for sentence in said:
                run.note_repair(sentence)
        for sentence in said:
            say(f"{run.name}: {sentence}")


def _clear(path: Path) -> str | None:
    """Make room for a run's folder. Return a description of the repair; None if there was none."""
    if path.is_symlink():
        if RunDir(path).has_finished():
            return None
        target = path.readlink()
        path.unlink()
        return f"its folder was a link to {target}, which stays as it is; the run starts again in a folder of its own"
    if path.is_dir():
        return None
    return f"a file stood in the place of its folder, and is called {put_aside(path).name} now; the run starts again"


def _misplaced(run: RunDir) -> Iterator[str]:
    """Delete links, folders in the places of files, and files in the places of folders."""
    for name, is_right in (*((name, stat.S_ISREG) for name in FILES), *((name, stat.S_ISDIR) for name in FOLDERS)):
        path = run.path / name
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not is_right(mode):
                remove(path)
                yield f"{name} was {_kind(mode)} and is deleted{' (not what it led to)' * stat.S_ISLNK(mode)}"
    if run.checkpoint.is_dir():
        states = [path for path in checkpoints(run.checkpoint).values() if not path.suffix]
        for path in sorted(run.checkpoint.iterdir()):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and path in states)):
                remove(path)
                yield f"checkpoint/{path.name} was {_kind(mode)} and is deleted"


def _kind(mode: int) -> str:
    kinds = {stat.S_ISLNK: "a link", stat.S_ISDIR: "a folder", stat.S_ISREG: "a file"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "no file")


def _unreadable(run: RunDir) -> Iterator[str]:
    """Delete the run's documents that cannot be read."""
    begun = run.status_path.exists() or run.checkpoint.is_dir()
    reads: dict[Path, Callable[[], Any]] = {
        run.status_path: run.written_status, run.manifest_path: run.manifest, run.config_path: run.fork,
        run.job_path: run.job,
    }  # fmt: skip
    for path, read in reads.items():
        if path.exists():
            try:
                read()
            except Damaged as fault:
                path.unlink()
                after = "is deleted" if path == run.job_path else "is written anew"
                yield f"{path.name} {fault.fault}, and {after}"
        elif begun and path != run.job_path:
            yield f"{path.name} was gone, and is written anew"
