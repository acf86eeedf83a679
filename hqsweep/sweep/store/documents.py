"""What may stand in the files of a run, type by type, so that what is read can be used without further checks.

A file that another program wrote to, or of which only a part reached the disk, is named with its fault. Keys that are
not named here may hold anything that JSON has.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hqsweep.errors import Damaged
from hqsweep.track.tables import NAMING, OPTIONAL

STATES = ("pending", "running", "finished", "failed", "interrupted")
LARGEST = 2**63
"""The bound of integers, as in every table that they go to."""
REPAIRED = "the sweep's `hqsweep run` command writes it again, and repeats the run where it has to"

Kind = Any
"""A type (float takes integers and NaN too, no number is a bool); a mapping of keys to their kinds; a list of the kind
of its elements; the words allowed; a tuple of kinds; None for null."""

TEXT, COUNT, NUMBER = (str, None), (int, None), (float, None)
PROGRESS = {"step": int, "steps": int, "part": NUMBER, "loss": NUMBER, "tokens_per_s": NUMBER, "eta_s": NUMBER}
STATUS: dict[str, Kind] = {
    "state": frozenset(STATES), "reason": TEXT, "exit_code": COUNT, "pid": COUNT, "host": TEXT, "attempt": int,
    "started": NUMBER, "ended": NUMBER, "seconds": float, "progress": (PROGRESS, None), "phase": TEXT,
}  # fmt: skip
MET = {"slot": str, "lost": bool, "first": int, "order": int, "sentence": str}
"""The keys that are read of a row of the manifest's "nonfinite" (train.nonfinite)."""
MOST_MET = 8
MANIFEST: dict[str, Kind] = {
    "run_id": str, "sweep": str, "arm": str, "seed": int, "job": str, "overrides": [str], "trunk": TEXT,
    "point": COUNT, "warnings": [str], "repairs": [str], "gemm_plan": dict, "recipe_schedule": [dict],
    "data_hash": TEXT, "kernel_digest": TEXT, "versions": dict, "device": str, "host": TEXT, "started": NUMBER,
    "params": COUNT, "tokens": COUNT, "epochs": NUMBER, "steps": dict,
    "nonfinite": [MET],
}  # fmt: skip
PLANNED = ("run_id", "sweep", "arm", "seed", "job", "overrides")
"""The keys that the manifest of every run has from the beginning."""
TRACK = dict.fromkeys(("kind", "mode", "project", "entity"), TEXT) | {"init_timeout_s": NUMBER}
SECTION = (dict.fromkeys(("input", "weight", "grad_output", "qkv", "s", "do", "dp"), TEXT), None)
RECIPE = dict.fromkeys(("linear", "grouped_linear", "dpa", "head"), SECTION) | {
    "name": TEXT, "qfactory": TEXT, "gemm": TEXT, "overrides": ([dict], None), "schedule": ([dict], None),
}  # fmt: skip
CONFIG: dict[str, Kind] = {
    "job": str, "seed": int, "recipe": (RECIPE, None), "fork": ({"noise": NUMBER}, None), "data": (dict, None),
    "model": ({"init_noise": NUMBER}, None), "train": (dict, None), "stats": ({"every": COUNT}, None),
    "track": (TRACK, None), "engine": (dict, None),
}  # fmt: skip
TRAINED: dict[str, Kind] = dict.fromkeys(("steps", "batch", "context"), int)
"""The keys of the section train that losses are counted over."""
JOB = {"id": str}


def check_document(
    path: Path, document: Any, fields: Mapping[str, Kind], required: Iterable[str] = (), remedy: str = REPAIRED
) -> dict[str, Any]:
    """The document, which was read from `path`. Raises Damaged where it is no mapping, lacks one of the `required`
    keys, or has a value of another kind than `fields` says, at any depth."""
    if not isinstance(document, dict):
        raise Damaged(path, f"holds {_shown(document)} where a mapping of keys belongs", remedy)
    odd = next((key for key in document if not (isinstance(key, str) and _writable(key))), None)
    if odd is not None:
        raise Damaged(path, f"has the key {_shown(odd)}, where text belongs", remedy)
    if lacking := [key for key in required if key not in document]:
        raise Damaged(path, f"has no key '{lacking[0]}'", remedy)
    for key, value in document.items():
        if fault := _fault(key, value, fields.get(key, ...)):
            raise Damaged(path, fault, remedy)
    return document


def met_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Sentences about the slots of a run that have met NaN or inf: the first ones, and how many more there are."""
    rows = manifest.get("nonfinite", [])
    more = len(rows) - MOST_MET
    return [row["sentence"] for row in rows[:MOST_MET]] + [f"{more} more slots have met NaN or inf"] * (more > 0)


def check_rows(path: Path, rows: list[Any], columns: Mapping[str, type]) -> None:
    """Raise Damaged, with the line, for a row that is no mapping, lacks a column that is not OPTIONAL, or has a value
    of another kind than `columns` says. null stands for a value that a row does not have, except in a column of
    NAMING."""
    if any(type(row) is not dict for row in rows):
        number = next(n for n, row in enumerate(rows, 1) if type(row) is not dict)
        raise _row_fault(path, number, f"is {_shown(rows[number - 1])}, no row")
    for name, kind in columns.items():
        values = [row.get(name, ...) for row in rows]
        odd = set(map(type, values)) - _types(name, kind)
        if odd:
            number = next(n for n, value in enumerate(values, 1) if type(value) in odd)
            came = values[number - 1]
            fault = f"has no '{name}'" if came is ... else f"has {_shown(came)} under '{name}'"
            raise _row_fault(path, number, f"{fault}, where {_wanted(kind)} belongs")
        if kind is str:
            unfit = {value for value in set(values) if isinstance(value, str) and not _writable(value)}
        else:
            unfit = {value for value in values if type(value) is int and abs(value) >= LARGEST}
        if unfit:
            number = next(n for n, value in enumerate(values, 1) if value in unfit)
            raise _row_fault(path, number, f"has {_shown(values[number - 1])} under '{name}', which no table can hold")


def _types(name: str, kind: type) -> set[type]:
    allowed: set[type] = {float, int} if kind is float else {kind}
    if name not in NAMING:
        allowed.add(type(None))
    if name in OPTIONAL:
        allowed.add(type(...))
    return allowed


def _row_fault(path: Path, number: int, fault: str) -> Damaged:
    return Damaged(path, f"line {number} {fault}", "repeat the run with --force")


def _fault(where: str, value: Any, kind: Any) -> str | None:
    """The fault of a value, as a sentence's part; None where it has none. Kind ... is anything plain."""
    if kind is ...:
        return _plain_fault(where, value)
    for option in kind if isinstance(kind, tuple) else (kind,):
        if _is(value, option):
            inner = _inner(where, value, option)
            return next((fault for at, part, of in inner if (fault := _fault(at, part, of))), None) or (
                None if inner else _plain_fault(where, value)
            )
    return f"has {_shown(value)} under '{where}', where {_wanted(kind)} belongs"


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, whatever is in it."""
    if kind is None:
        return value is None
    if isinstance(kind, frozenset):
        return isinstance(value, str) and value in kind
    if isinstance(kind, Mapping):
        return isinstance(value, dict) and kind.keys() <= value.keys() | _may_lack(kind)
    if isinstance(kind, list):
        return isinstance(value, list)
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, kind))
    return isinstance(kind, type) and isinstance(value, kind)


def _may_lack(kind: Mapping[str, Any]) -> set[str]:
    return {key for key, of_key in kind.items() if isinstance(of_key, tuple) and None in of_key}


def _inner(where: str, value: Any, kind: Any) -> list[tuple[str, Any, Any]]:
    """(name, value, kind) of what is in a value of the kind."""
    if isinstance(kind, Mapping):
        return [(f"{where}.{key}", part, kind.get(key, ...)) for key, part in value.items()]
    if isinstance(kind, list):
        return [(f"{where}.{index}", part, kind[0]) for index, part in enumerate(value)]
    return []


def _plain_fault(where: str, value: Any) -> str | None:
    """The fault of a value that may be anything that JSON has: YAML's dates, sets and keys other than text are
    faults."""
    if isinstance(value, dict):
        odd = next((key for key in value if not (isinstance(key, str) and _writable(key))), None)
        if odd is not None:
            return f"has {_shown(odd)} as a key in '{where}', where text belongs"
        return next((f for key, part in value.items() if (f := _plain_fault(f"{where}.{key}", part))), None)
    if isinstance(value, list):
        return next((f for i, part in enumerate(value) if (f := _plain_fault(f"{where}.{i}", part))), None)
    good = value is None or isinstance(value, bool | float)
    good = good or (isinstance(value, str) and _writable(value)) or (isinstance(value, int) and abs(value) < LARGEST)
    return None if good else f"has {_shown(value)} under '{where}', where text, a number or null belongs"


def _writable(text: str) -> bool:
    """Whether text can be encoded: JSON may hold one half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: Any) -> str:
    """A value for a sentence, short and in plain characters."""
    if isinstance(value, dict | list):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return "a number of more than 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _wanted(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", dict: "a mapping", None: "null"}
    if isinstance(kind, tuple):
        return " or ".join(_wanted(option) for option in kind)
    if isinstance(kind, frozenset):
        return f"one of {', '.join(sorted(kind))}"
    if isinstance(kind, Mapping):
        return f"a mapping with {', '.join(key for key in kind if key not in _may_lack(kind))}"
    return "a list" if isinstance(kind, list) else names.get(kind, "text")
