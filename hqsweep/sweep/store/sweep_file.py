"""sweep.json: the runs that a sweep has, and what it states about itself, under a checksum.

    {"name", "conf", "overrides", "runs" (names in grid order), "arms", "created", "study", "checksum"}

A run that is listed and has no folder is missing, and a folder that is not listed is no run of the sweep; so a sweep
does not silently have one seed fewer, or more.
"""

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from hqsweep.errors import Damaged
from hqsweep.sweep.store.files import put_aside, read_json, write_json
from hqsweep.sweep.store.names import run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seal import checksum

FILE = "sweep.json"
REWRITE = "the sweep's `hqsweep run` command writes it again"
TEXTS = ("conf", "created")
LISTS = ("overrides", "runs", "arms")


def read(folder: Path) -> dict[str, Any] | None:
    """The entries that write() wrote for the sweep in `folder`, None where the file is missing; study is {} in an older
    sweep. Raises Damaged, also for a file of an earlier version without a checksum."""
    path = folder / FILE
    document = read_json(path)
    if document is None:
        return None
    if not _is_list_of_runs(document):
        raise Damaged(path, "is not the list of a sweep's runs", REWRITE)
    entries = {key: value for key, value in document.items() if key != "checksum"}
    if "checksum" not in document:
        raise Unsealed(path, entries)
    if document["checksum"] != checksum(entries):
        raise Damaged(path, "contradicts its own checksum, so it was changed", REWRITE)
    return {"study": {}} | entries


class Unsealed(Damaged):
    """A sweep.json of an earlier version, which had no checksum, and its entries."""

    def __init__(self, path: Path, entries: dict[str, Any]) -> None:
        keep = f"`hqsweep verify --seal {path.parent}` keeps the sweep as it is"
        super().__init__(path, "has no checksum, so an earlier version wrote it", keep)
        self.facts = entries


def write(folder: Path, entries: Mapping[str, Any]) -> None:
    """Replace sweep.json; a folder in its place is put aside. The caller holds the sweep's lock."""
    path = folder / FILE
    if path.is_dir() and not path.is_symlink():
        put_aside(path)
    entries = {key: value for key, value in entries.items() if key != "checksum"}
    write_json(path, entries | {"checksum": checksum(entries)})


def rebuilt(folder: Path) -> dict[str, Any]:
    """The runs and arms of the folders in a sweep's folder, by name, whose config has the id that their name ends
    in."""
    runs = [RunDir(folder / name) for name in sorted(present(folder))]
    runs = [run for run in runs if _is_own(run)]
    return {"runs": [run.name for run in runs], "arms": list(dict.fromkeys(map(_arm, runs)))}


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep's, even if its list of runs is damaged."""
    return (folder / FILE).is_file()


def present(folder: Path, apart: Container[str] = ()) -> set[str]:
    """The names of the folders of runs in a sweep's folder, without the ones in `apart`."""
    names = [name for name in os.listdir(folder) if name not in apart]
    return {name for name in names if os.path.isfile(f"{folder}/{name}/config.yaml")}


def _is_list_of_runs(document: Any) -> bool:
    if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in TEXTS):
        return False
    lists = [document.get(key) for key in LISTS]
    good = all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists)
    plain = good and all(os.path.basename(name) == name and name not in ("", ".", "..") for name in document["runs"])
    return plain and isinstance(document.get("study", {}), dict)


def _is_own(run: RunDir) -> bool:
    try:
        return run.name.endswith(f"-{run_id(run.config())[:10]}")
    except (Damaged, KeyError, TypeError, ValueError):
        return False


def _arm(run: RunDir) -> str:
    try:
        return str(run.manifest().get("arm"))
    except Damaged:
        return run.name.partition("-s")[0]
