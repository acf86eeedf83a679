"""Sections of the config: their base class, the types of leaves, and pydantic's errors as sentences for people.

A sentence has the key path, the value that came, the values allowed, and the nearest valid name.
"""

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, ValidationError

from hqsweep.errors import UserError

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]*$")]
"""Part of a folder's name."""
Device = Literal["auto", "cpu", "cuda"]


class Section(BaseModel):
    """Frozen; unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


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
    """The dotted paths of all keys of a model, sections included: "train", "train.lr". A section that may be of several
    classes gives the keys of all, a key of two of them twice."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in sections(field.annotation).values():
            yield from leaves(section, f"{prefix}{name}.")


def sections(annotation: typing.Any) -> dict[str, type[BaseModel]]:
    """The sections that a key may hold, by tag: {} for a key with a value, and the tag "" where there is one
    section."""
    sections_by_tag: dict[str, type[BaseModel]] = {}
    for option in (annotation, *typing.get_args(annotation)):
        held, *marks = typing.get_args(option) if typing.get_origin(option) is typing.Annotated else (option,)
        if isinstance(held, type) and issubclass(held, BaseModel):
            sections_by_tag.setdefault(next((mark.tag for mark in marks if isinstance(mark, Tag)), ""), held)
    return sections_by_tag


def _fault(fault: typing.Any, model: type[BaseModel]) -> str:
    (path, within), kind = _placed(fault["loc"], model), fault["type"]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if kind == "extra_forbidden":
        return _unknown(path, within, model)
    if kind == "missing":
        return f"{path}: missing; give {path}=VALUE"
    must = fault["msg"]
    for theirs, ours in RENAMED.items():
        must = must.replace(theirs, ours)
    if kind in ("model_type", "model_attributes_type"):
        must = f"must be a section with the keys {', '.join(within.model_fields)}"
    return f"{path}: got {fault['input']!r}; {must}{_nearest_literal(fault)}"


def _placed(location: Sequence[typing.Any], model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """The dotted path of a key, without pydantic's tags of sections, and the innermost section on the path."""
    parts, ahead = [], list(map(str, location))
    while ahead and ahead[0] in model.model_fields:
        parts.append(ahead.pop(0))
        held = sections(model.model_fields[parts[-1]].annotation)
        if not held:
            break
        model = held[ahead.pop(0)] if ahead and ahead[0] in held else next(iter(held.values()))
    return ".".join(part for part in [*parts, *ahead] if part), model  # plain values have the tag ""


def _unknown(path: str, within: type[BaseModel], model: type[BaseModel]) -> str:
    """A sentence for an unknown key, with the same key of another section, else the nearest sibling, else the nearest
    key."""
    parent, _, name = path.rpartition(".")
    siblings = list(within.model_fields)
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in reversed(list(leaves(model)))}  # the first of a name
    near = [f"{parent}.{key}".lstrip(".") for key in difflib.get_close_matches(name, siblings, 1)]
    near += [by_name[key] for key in difflib.get_close_matches(name, by_name, 1, 0.75)]
    meant = by_name.get(name) or next(iter(near), None)
    takes = f"; {parent or 'the top level'} takes {', '.join(siblings)}"
    if meant == path:  # of a section of another kind
        kinds = sections(model.model_fields[parent].annotation).items()
        return (
            f"{path}: no such key here, but with {parent}={next(t for t, s in kinds if name in s.model_fields)}{takes}"
        )
    return f"{path}: no such key" + (f" (did you mean '{meant}'?)" if meant else takes)


def _nearest_literal(fault: typing.Any) -> str:
    if fault["type"] != "literal_error" or not isinstance(fault["input"], str):
        return ""
    allowed = [word.strip("' ") for word in fault["ctx"]["expected"].replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(fault["input"], allowed, 1, 0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
