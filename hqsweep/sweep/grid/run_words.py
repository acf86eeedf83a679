"""The words of `hqsweep run` as a grid whose keys are checked without torch, so that a mistyped word is reported at
once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hqsweep.checkpoints.user_model import check_model_files
from hqsweep.config.keys import check_keys
from hqsweep.errors import UserError
from hqsweep.sweep.grid.arms import Grid, GridPoint
from hqsweep.sweep.grid.compose import expand, factory_folders, known_confs

Checked = TypeVar("Checked")
QUICKSTART = "quickstart"


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words `conf=NAME KEY=VALUE...`: name, overrides, their grid, and the folders that are searched for Python
    factories."""

    conf: str
    overrides: tuple[str, ...]
    grid: Grid
    folders: list[str]


def read(words: Sequence[str], *, config_dir: Path | None = None, workers: int | None = None) -> Words:
    """The grid of the words; `workers` stands for engine.workers.

    Raises:
        UserError: the faults of any point, except in the meaning of its recipe.
    """
    conf, overrides = split_conf(words, config_dir)
    if workers is not None:
        overrides = [*overrides, f"engine.workers={workers}"]
    grid = expand(conf, overrides, config_dir)
    each(grid.points, check_keys)
    each(grid.points, check_model_files)
    _keep_quickstart_here(conf, overrides, grid.points)
    folders = factory_folders(conf, overrides, config_dir)
    return Words(conf=conf, overrides=tuple(overrides), grid=grid, folders=folders)


def _keep_quickstart_here(conf: str, overrides: Sequence[str], points: Sequence[GridPoint]) -> None:
    """A sweep named quickstart, or of that config, uploads nothing unless its words say how it is tracked."""
    asked = any(word.lstrip("+").startswith(("track=", "track.")) for word in overrides)
    for point in points:
        track = point.config.get("track")
        if not asked and isinstance(track, dict) and QUICKSTART in (conf, point.config.get("sweep")):
            track["mode"] = "offline" if track.get("mode") == "auto" else track.get("mode")


def each(points: Sequence[GridPoint], check: Callable[[dict[str, Any]], Checked]) -> list[Checked]:
    """Return the results of `check` for the config of every point. If only some points fail, the message names the
    first of these."""
    checked, faults = [], {}
    for point in points:
        try:
            checked.append(check(point.config))
        except UserError as error:
            faults.setdefault(str(error), point.changed)
    if not faults:
        return checked
    message, changed = next(iter(faults.items()))
    where = f" (in the run with {' '.join(changed)})" if changed and checked else ""
    raise UserError(message + where)


def split_conf(words: Sequence[str], config_dir: Path | None = None) -> tuple[str, list[str]]:
    """(NAME, overrides) of words among which there must be one conf=NAME."""
    confs = [word.removeprefix("conf=") for word in words if word.startswith("conf=")]
    rest = [word for word in words if not word.startswith("conf=")]
    known = known_confs(config_dir)
    if not confs:
        meant = next((word for word in rest if word in known), "")
        hint = f" (did you mean 'conf={meant}'?)" if meant else ""
        raise UserError(f"conf=NAME is missing{hint}; known are {', '.join(known)}, or give conf=PATH.yaml")
    if len(confs) > 1 or "," in confs[0] or not confs[0]:
        words = " ".join(f"conf={conf}" for conf in confs)
        raise UserError(f"{words}: a sweep has one conf; give one name, and sweep keys within it")
    return confs[0], rest


def with_seeds(words: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """The words of `hqsweep run` with these seeds in place of their own."""
    rest = [word for word in words if word.lstrip("+").partition("=")[0] != "seed"]
    return [*rest, f"seed={','.join(map(str, seeds))}"]
