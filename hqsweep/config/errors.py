"""Pydantic's errors as sentences for people: the key path, what came, what is allowed, the nearest valid name."""

import difflib
import typing
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ValidationError

from hqsweep.errors import UserError

RENAMED = {
    "Input should be a valid integer": "must be an integer",
    "Input should be a valid number": "must be a number",
    "Input should be a valid string": "must be text (quote it: \"'...'\")",
    "Input should be a valid boolean": "must be true or false",
    "Input should be a valid list": "must be a list, as in [a,b]",
    "Input should be": "must be",
    "String should match pattern": "must match the pattern",
    "List should have": "must have",
}


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """All faults in one line, separated by semicolons; `model` is the class that was validated."""
    return "; ".join(dict.fromkeys(_fault(fault, model) for fault in error.errors()))


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys of a model, sections included: "train", "train.lr"."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = _section(field.annotation)
        if section:
            yield from leaves(section, f"{prefix}{name}.")


def _fault(fault: typing.Any, model: type[BaseModel]) -> str:
    path, kind = ".".join(map(str, fault["loc"])), fault["type"]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if kind == "extra_forbidden":
        return _unknown(path, model)
    if kind == "missing":
        return f"{path}: missing; give {path}=VALUE"
    must = fault["msg"]
    for theirs, ours in RENAMED.items():
        must = must.replace(theirs, ours)
    if kind in ("model_type", "model_attributes_type"):
        must = f"must be a section with the keys {', '.join(_section_keys(path, model))}"
    return f"{path}: got {fault['input']!r}; {must}{_nearest_literal(fault)}"


def _unknown(path: str, model: type[BaseModel]) -> str:
    """An unknown key, with the same key of another section, else the nearest sibling, else the nearest key anywhere."""
    parent, _, name = path.rpartition(".")
    siblings = _section_keys(parent, model)
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in reversed(list(leaves(model)))}  # the first of a name
    near = [f"{parent}.{key}".lstrip(".") for key in difflib.get_close_matches(name, siblings, 1)]
    near += [by_name[key] for key in difflib.get_close_matches(name, by_name, 1, 0.75)]
    meant = by_name.get(name) or next(iter(near), None)
    takes = f"; {parent or 'the top level'} takes {', '.join(siblings)}"
    return f"{path}: no such key" + (f" (did you mean '{meant}'?)" if meant else takes)


def _nearest_literal(fault: typing.Any) -> str:
    if fault["type"] != "literal_error" or not isinstance(fault["input"], str):
        return ""
    allowed = [word.strip("' ") for word in fault["ctx"]["expected"].replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(fault["input"], allowed, 1, 0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _section(annotation: typing.Any) -> type[BaseModel] | None:
    """The section that a key may hold; None for a key with a value."""
    held = [annotation, *typing.get_args(annotation)]
    return next((each for each in held if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _section_keys(path: str, model: type[BaseModel]) -> Sequence[str]:
    for part in filter(None, path.split(".")):
        model = _section(model.model_fields[part].annotation)
    return list(model.model_fields)
