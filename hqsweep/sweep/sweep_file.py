"""sweep.json: which runs a sweep has, and what it states about itself, under a checksum.

    {"name", "conf", "overrides", "runs" (names in grid order), "arms", "created", "study", "checksum"}

A run that is listed and has no folder is missing, and a folder that is not listed is no run of the sweep; so a sweep
does not silently have one seed fewer, or more.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqsweep.errors import Damaged
from hqsweep.sweep.files import put_aside, read_json, write_json
from hqsweep.sweep.names import run_id
from hqsweep.sweep.run_dir import RunDir
from hqsweep.sweep.seal import checksum

FILE = "sweep.json"
REWRITE = "the sweep's `hqsweep run` command writes it again"
TEXTS = ("conf", "created")
LISTS = ("overrides", "runs", "arms")


def read(folder: Path) -> dict[str, Any] | None:
    """What write() wrote for the sweep in `folder`, None where there is no such file; study is {} where the sweep is
    older than that. Raises Damaged, for a file of an earlier version without a checksum too."""
    path = folder / FILE
    document = read_json(path)
    if document is None:
        return None
    if not _is_list_of_runs(document):
        raise Damaged(path, "is not the list of a sweep's runs", REWRITE)
    facts = {key: value for key, value in document.items() if key != "checksum"}
    if "checksum" not in document:
        raise Unsealed(path, facts)
    if document["checksum"] != checksum(facts):
        raise Damaged(path, "contradicts its own checksum, so it was changed", REWRITE)
    return {"study": {}} | facts


class Unsealed(Damaged):
    """A sweep.json of an earlier version, which had no checksum, and what it says."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        keep = f"`hqsweep verify --seal {path.parent}` keeps the sweep as it is"
        super().__init__(path, "has no checksum, so an earlier version wrote it", keep)
        self.facts = facts


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Replace sweep.json; a folder in its place is put aside. The caller holds the sweep's lock."""
    path = folder / FILE
    if path.is_dir() and not path.is_symlink():
        put_aside(path)
    facts = {key: value for key, value in facts.items() if key != "checksum"}
    write_json(path, facts | {"checksum": checksum(facts)})


def rebuilt(folder: Path) -> dict[str, Any]:
    """Runs and arms, by name, of the folders in a sweep's folder whose config is the one that their name ends in."""
    runs = [RunDir(folder / name) for name in sorted(present(folder))]
    runs = [run for run in runs if _is_own(run)]
    return {"runs": [run.name for run in runs], "arms": list(dict.fromkeys(map(_arm, runs)))}


def present(folder: Path) -> set[str]:
    """Names of the folders of runs in a sweep's folder."""
    return {entry.name for entry in os.scandir(folder) if (Path(entry) / "config.yaml").is_file()}


def _is_list_of_runs(document: Any) -> bool:
    if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in TEXTS):
        return False
    lists = [document.get(key) for key in LISTS]
    good = all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in lists)
    plain = good and all(Path(name).name == name and name not in ("", "..") for name in document["runs"])
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
