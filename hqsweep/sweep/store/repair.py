"""Repair of a run's folder before work in it. A link or a folder in the place of a file is deleted, and so is a file
that cannot be read: both are written anew. Each repair is reported. Of a link only the link is deleted, never its
target.

A run that has ended is not repaired. Its seal tells the fault (run_dir.RunDir.check), and the run is repeated.
"""

import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hqsweep.errors import Damaged
from hqsweep.host import Busy
from hqsweep.sweep.store import seal
from hqsweep.sweep.store.files import put_aside
from hqsweep.sweep.store.run_dir import RunDir, remove
from hqsweep.track.tables import TABLES
from hqsweep.train.record import checkpoints

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
