"""Format strings: a name and options joined by `+`, such as "nvfp4+2d" or "fp8_block+fp32_scale".

parse and str are inverses: parse(str(f)) == f for every format, and str gives one canonical text. `spellings` lists
these texts, so that tables of formats are derived and a new format or option is in all of them.
"""

import re
from functools import cache
from itertools import combinations

from hqsweep.errors import UserError, nearest
from hqsweep.formats.base import Format
from hqsweep.formats.fp8 import Fp8Block, Fp8Current, Fp8Delayed
from hqsweep.formats.identity import DTYPES, Identity
from hqsweep.formats.mx import MX
from hqsweep.formats.nvfp4 import NVFP4
from hqsweep.formats.nvfp4_tensor import NVFP4Tensor

FORMATS: dict[str, tuple[type[Format], dict[str, object]]] = {
    **{name: (Identity, {"name": name}) for name in DTYPES},
    "fp8_current": (Fp8Current, {}),
    "fp8_delayed": (Fp8Delayed, {}),
    "fp8_block": (Fp8Block, {}),
    "mxfp8": (MX, {"name": "mxfp8"}),
    "mxfp6_e2m3": (MX, {"name": "mxfp6_e2m3", "element_name": "e2m3"}),
    "mxfp6_e3m2": (MX, {"name": "mxfp6_e3m2", "element_name": "e3m2"}),
    "mxfp4": (MX, {"name": "mxfp4", "element_name": "e2m1"}),
    "nvfp4": (NVFP4, {}),
    "nvfp4+tensor": (NVFP4Tensor, {}),
}
"""Name -> class and the fields that the name fixes. Some names have a second word, which stands among the options."""

_NUMBERED = re.compile(r"([a-z]+)(\d+(\.\d*)?(e-?\d+)?)")


def parse(text: str) -> Format:
    """Text -> Format; UserError names the unknown part, the known one most like it, and what is allowed."""
    name, tokens = words_of(text)
    if name not in FORMATS:
        raise UserError(f"format '{text}': unknown name '{name}'{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    cls, fixed = FORMATS[name]
    chosen: dict[str, object] = {}
    for token in tokens:
        for field, value in _fields(text, name, token).items():
            if field in chosen:
                raise UserError(f"format '{text}': option '+{token}' sets {field} a second time; give it once")
            chosen[field] = value
    format = cls(**fixed, **chosen)
    _ = format.text  # worked out now: torch.compile cannot trace the lock that a cached_property of Python 3.11 takes
    return format


def words_of(text: str) -> tuple[str, list[str]]:
    """The name that a text begins with, known or not, with its second word if it has one; and the options."""
    name, *tokens = text.strip().split("+")
    second = next((token for token in tokens if f"{name}+{token}" in FORMATS), None)
    if second is None:
        return name, tokens
    tokens.remove(second)
    return f"{name}+{second}", tokens


def options(name: str) -> list[str]:
    """Options that a format name takes, without the `+`."""
    cls, fixed = FORMATS[name]
    return [o for o, fields in cls.OPTIONS.items() if not fields.keys() & fixed.keys()]


@cache
def spellings(name: str) -> tuple[str, ...]:
    """Canonical texts of every combination of options that a format name takes, those with few options first.

    Options that a number follows (NUMBERED) are left out.
    """
    words = options(name)
    chosen = [combination for count in range(len(words) + 1) for combination in combinations(words, count)]
    return tuple(text for text in ("+".join((name, *combination)) for combination in chosen) if _canonical(text))


def bases() -> tuple[str, ...]:
    """The first name of every scaling, high precision included."""
    first: dict[str | None, str] = {}
    for name in FORMATS:
        first.setdefault(parse(name).scaling, name)
    return tuple(first.values())


def _canonical(text: str) -> bool:
    """Whether parse takes the text and str gives it back."""
    try:
        return str(parse(text)) == text
    except UserError:  # options that exclude each other
        return False


def _fields(text: str, name: str, token: str) -> dict[str, object]:
    cls, allowed = FORMATS[name][0], options(name)
    if token in allowed:
        return dict(cls.OPTIONS[token])
    number = _NUMBERED.fullmatch(token)
    field = cls.NUMBERED.get(number[1]) if number else None
    if field and (isinstance(getattr(cls, field), float) or number[2].isdigit()):
        return {field: type(getattr(cls, field))(number[2])}
    allowed += [known.removeprefix(f"{name}+") for known in FORMATS if known.startswith(f"{name}+")]
    takes = ", ".join([f"+{o}" for o in allowed] + [f"+{o}N" for o in cls.NUMBERED]) or "no options"
    raise UserError(f"format '{text}': unknown option '+{token}'{nearest(token, allowed)}; {name} takes {takes}")
