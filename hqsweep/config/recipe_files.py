"""Recipes by name and by file, as the YAML says them, without torch and without Hydra.

As on the command line, a name is looked up in ./conf/recipe, the user's own, then among the packaged recipes. Files
that need Hydra (references to other keys, a defaults list of other configs) are refused with the remedy.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hqsweep.config.safe import load_yaml
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import NAMES
from hqsweep.memo import memo

PACKAGED = files("hqsweep") / "conf"
"""The packaged configs: conf/ of the wheel, or of the checkout that an editable install leads to."""
OWN = Path("conf")
"""The user's configs, in the working directory; they come before the packaged ones."""
GROUP = "recipe"
FORMAT = "format:"
"""The beginning of a text that means a format where a recipe has its name."""
FORMAT_TEXTS = tuple(f"{FORMAT}{name}" for name in NAMES)


def names(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names that a config group offers; the group "" has whole configs. Hydra's own begin with an
    underscore."""
    found = sorted(path.stem for folder in folders for path in (folder / group).glob("*.yaml"))
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


@memo
def packaged_names() -> tuple[str, ...]:
    """The names of the packaged recipes, sorted."""
    return tuple(names(GROUP, [PACKAGED]))


def known_names() -> list[str]:
    """All names that recipe_file knows, sorted."""
    return sorted({*packaged_names(), *names(GROUP, [OWN])})


def recipe_file(name: str) -> Path | None:
    """The file of a recipe's name: ./conf/recipe/NAME.yaml, or else the packaged one; None for all other texts."""
    own = OWN / GROUP / f"{name}.yaml"
    if not name.startswith("_") and os.path.isfile(own):  # which says no to any text, where Path.is_file() raises
        return own
    return PACKAGED / GROUP / f"{name}.yaml" if name in packaged_names() else None


def read_recipe(path: Path) -> Mapping[str, Any]:
    """The `recipe` config of a YAML file: a recipe, or a config that has one. Its fields are unchecked.

    Raises:
        UserError: there is no such file, it is a folder or cannot be read, its YAML gives no mapping, or is for Hydra.
    """
    if os.path.isdir(path):
        raise UserError("is a folder; give the YAML file of a recipe")
    if not os.path.exists(path):
        raise UserError(f"no such file{nearest(path.name, _yaml_names(path.parent))}")
    config = _composed(path, ())
    if path.resolve().parent.name != GROUP:
        config = config.get("recipe", config)
    if not isinstance(config, Mapping):
        raise UserError("its YAML gives no mapping as recipe; write name and linear at the top")
    return config


def _composed(path: Path, before: Sequence[Path]) -> dict[str, Any]:
    """The mapping of a file, merged with the recipes of its defaults list as Hydra merges them: the last one wins."""
    if any(path.samefile(other) for other in before):
        raise UserError(f"its defaults list leads back to {path.name}; leave that out")
    try:
        own = load_yaml(path)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror}); give a YAML file") from None
    if not isinstance(own, dict):
        raise UserError("its YAML is no mapping; write name and linear at the top")
    if any("${" in text for text in _texts(own)):
        raise UserError(f"it refers to other keys (${{...}}){_for_hydra(path)}")
    bases = own.pop("defaults", None) or []
    if not bases:
        return own
    by_name = isinstance(bases, list) and all(isinstance(base, str) for base in bases)
    if path.resolve().parent.name != GROUP or not by_name:
        raise UserError(f"it has a defaults list of other configs{_for_hydra(path)}")
    merged: dict[str, Any] = {}
    for base in bases if "_self_" in bases else [*bases, "_self_"]:
        part = own if base == "_self_" else _composed(_base(path, base), [*before, path])
        merged = _merged(merged, part)
    return merged


def _base(path: Path, name: str) -> Path:
    """The file of a name in the defaults list of another one: in its folder, or packaged."""
    beside, packaged = path.parent / f"{name}.yaml", PACKAGED / GROUP / f"{name}.yaml"
    if beside.is_file() or name in packaged_names():
        return beside if beside.is_file() else packaged
    known = sorted({*packaged_names(), *names(GROUP, [path.resolve().parents[1]])})
    raise UserError(f"its defaults list names '{name}', which is no recipe{nearest(name, known)}")


def _merged(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def _for_hydra(path: Path) -> str:
    return (
        f", which the command line alone composes; `hqsweep recipe export {path} --to json --out WHOLE.yaml` writes a"
        " file that Python takes"
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _yaml_names(folder: Path) -> list[str]:
    return [path.name for pattern in ("*.yaml", "*.yml") for path in folder.glob(pattern)]
