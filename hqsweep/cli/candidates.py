"""Candidates for completion, from the names of files alone: a TAB may not wait for torch or Hydra to be imported.

Config keys are read from the packaged YAML files, which have all of them (a test compares them with the typed config).
Every function takes the beginning of a word and returns whole words; one that ends in "=" or "." goes on.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import JOBS
from hqsweep.config.recipe_files import OWN, PACKAGED, names
from hqsweep.config.safe import load_yaml
from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore

_PLAIN = re.compile(r"[\w./@:=+,-]*")


def run_word(beginning: str, config_dir: Path | None = None) -> list[str]:
    """A word of `hqsweep run`: conf=NAME, GROUP=NAME[,NAME...], or KEY=."""
    key, equals, value = beginning.partition("=")
    if not equals:
        folders = _folders(config_dir)
        return _starting(beginning, ["conf=", *(f"{name}=" for name in (*groups(folders), *keys(folders)))])
    first, comma, last = value.rpartition(",")
    group = "" if key == "conf" else key
    return [f"{key}={first}{comma}{name}" for name in _starting(last, names(group, _folders(config_dir)))]


def recipe_name(beginning: str, config_dir: Path | None = None) -> list[str]:
    """A recipe of the package, of config_dir or of ./conf."""
    return _starting(beginning, names("recipe", _folders(config_dir)))


def run_or_sweep(beginning: str, runs_dir: Path) -> list[str]:
    """The name of a sweep or of a run."""
    store = RunStore(runs_dir)
    try:
        sweeps = store.sweeps()
        return _starting(beginning, [*sweeps, *(run.name for sweep in sweeps for run in store.runs(sweep))])
    except (UserError, OSError):
        return []


SIZE = "size"
"""The group whose files set keys of other sections."""


def groups(folders: Sequence[Path]) -> list[str]:
    named = sorted(path.parent.name for folder in folders for path in folder.glob("*/*.yaml"))
    return list(dict.fromkeys(named))


def keys(folders: Sequence[Path]) -> list[str]:
    """Dotted paths of all values of the jobs' configs and of the groups, sections left out."""
    complete = (*JOBS, "fork", "factorial")  # files with all keys of a job, of a fork study, and of a design
    named = [key for name in complete for key in _leaves(_read(PACKAGED / f"{name}.yaml"))]
    for group in (name for name in groups(folders) if name != SIZE):
        for folder in folders:
            for path in sorted((folder / group).glob("*.yaml")):
                named += [f"{group}.{key}" for key in _leaves(_read(path))]
    return list(dict.fromkeys(key for key in named if "defaults" not in key and "hydra" not in key))


def _leaves(section: Any) -> Iterator[str]:
    for key, value in section.items() if isinstance(section, dict) else ():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in _leaves(value))
        else:
            yield str(key)


def _read(path: Path) -> Any:
    """The content of a YAML file, or None where it cannot be read."""
    try:
        return load_yaml(path)
    except Exception:  # a TAB never prints a traceback
        return None


def _folders(config_dir: Path | None) -> list[Path]:
    return [folder for folder in (config_dir, OWN, PACKAGED) if folder is not None and folder.is_dir()]


def _starting(beginning: str, words: Sequence[str]) -> list[str]:
    """Words that begin so, and that a shell takes as they are: a name of a file or a key of a YAML may be anything."""
    return [word for word in words if word.startswith(beginning) and _PLAIN.fullmatch(word)]
