"""Texts of formats to Formats, and lists of all formats.

parse and str are inverses: parse(str(f)) == f for every format, and str gives one canonical text. `spellings` lists
these texts. Tables of formats are derived from it, so that a new format or option is in all of them.
"""

from functools import cache
from importlib import import_module
from itertools import combinations

from hqsweep.errors import UserError
from hqsweep.formats.base import Format
from hqsweep.formats.spec import NAMES, Family, fields_of, options


def _class(family: Family) -> type[Format]:
    return getattr(import_module(f"hqsweep.formats.{family.module}"), family.cls)


FORMATS = {name: (_class(family), family.names[name]) for name, family in NAMES.items()}
"""Name -> class and the fields that the name fixes."""


def parse(text: str) -> Format:
    """Return the Format of a text. UserError as for spec.fields_of(), and for options that exclude each other."""
    name, fields = fields_of(text)
    format = FORMATS[name][0](**fields)
    _ = format.text  # computed now: torch.compile cannot trace the lock in Python 3.11's cached_property
    return format


@cache
def spellings(name: str) -> tuple[str, ...]:
    """Return the canonical texts of all combinations of a name's options, those with few options first.

    Options that a number follows are left out.
    """
    words = options(name)
    chosen = [combination for count in range(len(words) + 1) for combination in combinations(words, count)]
    return tuple(text for text in ("+".join((name, *combination)) for combination in chosen) if _canonical(text))


def bases() -> tuple[str, ...]:
    """Return the first name of every scaling, high precision included."""
    first: dict[str | None, str] = {}
    for name, family in NAMES.items():
        first.setdefault(family.scaling, name)
    return tuple(first.values())


def _canonical(text: str) -> bool:
    """Return whether parse takes the text and str gives it back."""
    try:
        return str(parse(text)) == text
    except UserError:  # options that exclude each other
        return False
