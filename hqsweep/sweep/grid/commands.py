"""Grids of a program of the user's own (job: command): the name of each recipe, and what its command must hold."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hqsweep.config.command import placeholders
from hqsweep.config.jobs import COMMAND
from hqsweep.config.study import StudyConfig, margin_in_tokens
from hqsweep.errors import UserError
from hqsweep.sweep.grid.point import GridPoint, section


def name_recipe(config: dict[str, Any]) -> None:
    """Replace the word for {recipe} of a command by its section: its name, of a path the file's name."""
    word = config.get("recipe")
    if config.get("job") == COMMAND and isinstance(word, str | int | float):
        text = str(word)
        name = Path(text).stem if text.endswith((".yaml", ".yml")) else text
        config["recipe"] = {"name": name, "text": text}


def check_commands(points: Sequence[GridPoint], study: StudyConfig) -> None:
    """UserError for commands that give several points of the grid the same words, and for what a study of commands
    cannot be: forks, a null arm that hqsweep makes, a margin in tokens."""
    if points[0].config.get("job") != COMMAND:
        return
    if study.null_arm:
        raise UserError(
            "null_arm: true, but hqsweep knows no weights of a command; add an arm that repeats the baseline, and name"
            " it by judge.null_arm=NAME"
        )
    if study.fork is not None:
        raise UserError("fork: a command has no trunk that hqsweep could fork; leave it out")
    if margin_in_tokens(study.margin) == margin_in_tokens(study.margin):
        raise UserError(f"margin: {study.margin}; hqsweep knows no tokens of a command; give a part, as in 0.25%")
    by_command: dict[Any, list[GridPoint]] = {}
    for point in points:
        by_command.setdefault((point.config.get("command"), point.config.get("log")), []).append(point)
    for (command, _), own in by_command.items():
        _check(command, own, grows=study.seeds.until == "decided")


def _check(command: Any, points: Sequence[GridPoint], *, grows: bool) -> None:
    """Check the points of one command."""
    if not isinstance(command, str):
        raise UserError(
            f"command: got {command!r}; give the words of a program, as in 'python train.py --seed {{seed}}'"
        )
    known = placeholders(command, "command")
    if "arm" not in known and _varies(section(point, "recipe").get("text") for point in points):
        _need("recipe", known)
    if grows or _varies(point.config.get("seed") for point in points):
        _need("seed", known)
    for key in dict.fromkeys(key for point in points for key in section(point, "args")):
        if _varies(section(point, "args").get(key) for point in points):
            _need(key, known)


def _varies(values: Iterable[Any]) -> bool:
    return len(set(map(str, values))) > 1


def _need(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UserError(
            f"command: {name} varies over the grid, and no {{{name}}} is in it, so that runs would repeat each other;"
            f" pass it on, as in --{name} {{{name}}}"
        )
