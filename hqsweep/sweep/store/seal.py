"""The seal of a run that has ended: sizes and hashes of its files, so that a changed file is detected.

    seal.json   {"version", "hqsweep", "run" (its folder's name), "files": {name: {"bytes", "sha256"}}, "checksum"}

It covers config, manifest, status, rows, Parquet copies and captured operands. It is written before the status that it
covers, so that a run with an ended status has one; whatever takes the status back takes the seal away. It holds no
times and no paths from outside, so a copy of the folder is as good. Somebody who edits rows and writes the seal that
fits them is not found out: there is no key.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hqsweep.config.safe import loads
from hqsweep.errors import Damaged
from hqsweep.sweep.store.files import read_bytes, write_json

FILE = "seal.json"
VERSION = 1
SEALED = ("finished", "failed")
"""States of runs that have a seal. A failed run has results too: at which step its loss diverged."""
SMALL = ("config.yaml", "manifest.json", "status.json")
"""Files that are covered by name, and that survey() reads."""
ROWS = (".jsonl", ".parquet")
CAPTURED = "captured"
"""The folder of a run with the operands of sampled steps."""
REPEAT = "the sweep's `hqsweep run` command repeats the run"

Files = Mapping[str, Mapping[str, Any]]
"""Name -> {"bytes": size, "sha256": hex} of each file under a seal. Captured files begin with "captured/"."""


def covers(name: str) -> bool:
    """Return whether a seal covers the file of that name; names of captured files begin with "captured/"."""
    return name in SMALL or ("/" not in name and name.endswith(ROWS)) or _is_captured(name)


def write(folder: Path, status: bytes) -> None:
    """Seal the run in `folder`: its files as they are, and status.json as `status`, which is written later."""
    files = {name: _hashed(folder / name) for name in _present(folder)}
    files["status.json"] = {"bytes": len(status), "sha256": hashlib.sha256(status).hexdigest()}
    document = {"version": VERSION, "hqsweep": version("hqsweep"), "run": folder.name, "files": files}
    write_json(folder / FILE, document | {"checksum": checksum(document)})


def remove(folder: Path) -> None:
    """Delete the seal of a run that goes on, or is to be repeated."""
    (folder / FILE).unlink(missing_ok=True)


def state(folder: Path) -> Files | None:
    """Return the seal's entry of each file, None without a seal. Raises Damaged for a seal that has changed, and for
    the seal of another run."""
    path = folder / FILE
    try:
        data = read_bytes(path)
        if data is None:
            return None
        document = loads(data)
        if document["version"] > VERSION:
            raise Damaged(path, f"is of version {document['version']}", "a newer hqsweep wrote it; take that one")
        if document["checksum"] != checksum({key: value for key, value in document.items() if key != "checksum"}):
            raise Damaged(path, "contradicts its own checksum, so it was changed", REPEAT)
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError):
        raise Damaged(path, "is not the seal that was written there", REPEAT) from None
    if document["run"] != folder.name:
        raise Damaged(path, f"is the seal of the run {document['run']}", REPEAT)
    return document["files"]


def check(folder: Path, files: Files, name: str, data: bytes | None) -> None:
    """Raises Damaged unless the file `name` is to hold `data` (None: is not to be there) by the seal."""
    size = None if data is None else len(data)
    _check_size(folder, files, name, size)
    if data is not None and hashlib.sha256(data).hexdigest() != files[name]["sha256"]:
        raise _changed(folder, name)


def survey(folder: Path, files: Files, read: Callable[[Path], bytes | None] = read_bytes) -> None:
    """Raises Damaged for a file that is gone, new or of another size, and for an edited one of SMALL, which `read`
    gives: a look that costs no reading of rows."""
    present = _present(folder)
    for name in sorted({*files, *present}):
        if name in SMALL:
            check(folder, files, name, read(folder / name))
        else:
            _check_size(folder, files, name, present.get(name))


def faults(folder: Path, files: Files, deep: bool = True) -> Iterator[Damaged]:
    """The faults of the files, which are all read; without `deep` all but the large ones in captured/."""
    present = _present(folder)
    for name in sorted({*files, *present}):
        path = folder / name
        try:
            _check_size(folder, files, name, present.get(name))
            read = name in present and (deep or not _is_captured(name))
            if read and _hashed(path)["sha256"] != files[name]["sha256"]:
                raise _changed(folder, name)
        except Damaged as fault:
            yield fault


def checksum(document: Mapping[str, Any]) -> str:
    """Hex sha256 of the canonical JSON (sorted keys, no spaces) of a document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_size(folder: Path, files: Files, name: str, size: int | None) -> None:
    if name not in files and size is not None:
        raise Damaged(folder / name, "was not there when the run ended", f"delete that file, or {REPEAT}")
    if name in files and size is None:
        raise Damaged(folder / name, "is gone", REPEAT)
    if name in files and size != files[name]["bytes"]:
        raise Damaged(folder / name, f"has {size} bytes, and had {files[name]['bytes']} when the run ended", REPEAT)


def _changed(folder: Path, name: str) -> Damaged:
    return Damaged(folder / name, "is not what it was when the run ended", REPEAT)


def _present(folder: Path) -> dict[str, int]:
    """Names of the files that a seal covers, in order -> their sizes in bytes."""
    entries = {entry.name: entry for entry in os.scandir(folder)}
    if CAPTURED in entries and entries[CAPTURED].is_dir():
        entries |= {f"{CAPTURED}/{entry.name}": entry for entry in os.scandir(folder / CAPTURED)}
    return {name: entries[name].stat().st_size for name in sorted(entries) if covers(name) and entries[name].is_file()}


def _is_captured(name: str) -> bool:
    return name.startswith(f"{CAPTURED}/") and name.endswith(".safetensors")


def _hashed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
