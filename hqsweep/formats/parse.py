"""Format strings: a name and options joined by `+`, such as "nvfp4+2d" or "fp8_block+fp32_scale".

parse and str are inverses: parse(str(f)) == f for every format, and str gives one canonical text. `spellings` lists
these texts, so that tables of formats are derived and a new format or option is in all of them.
"""

from functools import cache
from itertools import combinations

from hqsweep.config.format_text import NAMES, fields_of, options
from hqsweep.errors import UserError
from hqsweep.formats.base import Format
from hqsweep.formats.fp8 import Fp8Block, Fp8Current, Fp8Delayed
from hqsweep.formats.identity import Identity
from hqsweep.formats.mx import MX
from hqsweep.formats.nvfp4 import NVFP4
from hqsweep.formats.nvfp4_tensor import NVFP4Tensor

CLASSES: dict[str, type[Format]] = {
    "identity": Identity, "fp8_current": Fp8Current, "fp8_delayed": Fp8Delayed, "fp8_block": Fp8Block, "mx": MX,
    "nvfp4": NVFP4, "nvfp4_tensor": NVFP4Tensor,
}  # fmt: skip
FORMATS = {name: (CLASSES[family], fixed) for name, (family, fixed) in NAMES.items()}
"""Name -> class and the fields that the name fixes."""


def parse(text: str) -> Format:
    """Text -> Format; UserError names the unknown part, the known one most like it, and what is allowed."""
    name, fields = fields_of(text)
    format = FORMATS[name][0](**fields)
    _ = format.text  # worked out now: torch.compile cannot trace the lock that a cached_property of Python 3.11 takes
    return format


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
