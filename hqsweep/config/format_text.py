"""Texts of number formats and quantizers as names and options, without torch: a mistyped one is told at once.

What the words mean is in hqsweep.formats, whose classes take their options from here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hqsweep.errors import UserError, nearest

OPTIONS: dict[str, dict[str, dict[str, object]]] = {
    "identity": {},
    "fp8_current": {"e5m2": {"element_name": "e5m2"}, "pow2": {"pow2": True}},
    "fp8_delayed": {
        "e5m2": {"element_name": "e5m2"},
        "most_recent": {"most_recent": True},
        "local_amax": {"local_amax": True},
        "skip_nonfinite": {"skip_nonfinite": True},
    },
    "fp8_block": {
        "e5m2": {"element_name": "e5m2"},
        "2d": {"two_d": True},
        "pow2": {"pow2": True},
        "fp32_scale": {"pow2": False},
    },
    "mx": {
        "e5m2": {"element_name": "e5m2"},
        "2d": {"two_d": True},
        "floor": {"scale_rounding": "floor"},
        "even": {"scale_rounding": "even"},
    },
    "nvfp4": {
        "2d": {"two_d": True},
        "rht": {"rht": True},
        "nosign": {"rht_signed": False},
        "sr": {"sr": True},
        "row_scaled": {"row_scaled": True},
        "4over6": {"four_over_six": True},
        "mse": {"error_mode": "mse"},
        "fast_error": {"fast_error": True},
        "max448": {"e4m3_max": 448},
    },
    "nvfp4_tensor": {
        "rht": {"rht": True},
        "nosign": {"rht_signed": False},
        "sr": {"sr": True},
        "pow2": {"pow2": True},
    },
}
"""Class of formats -> option -> the fields of the class that it sets."""
NUMBERED: dict[str, dict[str, tuple[str, type]]] = {
    "fp8_current": {"eps": ("amax_epsilon", float)},
    "fp8_block": {"eps": ("amax_epsilon", float)},
    "fp8_delayed": {"history": ("history", int)},
}
"""Class of formats -> option that a number follows, such as "eps" in "eps16.0" -> its field, and the field's type."""
NAMES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: ("identity", {"name": name}) for name in ("bf16", "fp16", "fp32")},
    "fp8_current": ("fp8_current", {}),
    "fp8_delayed": ("fp8_delayed", {}),
    "fp8_block": ("fp8_block", {}),
    "mxfp8": ("mx", {"name": "mxfp8"}),
    "mxfp6_e2m3": ("mx", {"name": "mxfp6_e2m3", "element_name": "e2m3"}),
    "mxfp6_e3m2": ("mx", {"name": "mxfp6_e3m2", "element_name": "e3m2"}),
    "mxfp4": ("mx", {"name": "mxfp4", "element_name": "e2m1"}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4+tensor": ("nvfp4_tensor", {}),
}
"""Name -> its class, and the fields that the name fixes. Some have a second word, which stands among the options."""
SCALINGS: dict[str, str | None] = {
    "identity": None, "fp8_current": "tensor", "fp8_delayed": "tensor", "fp8_block": "block", "mx": "mx",
    "nvfp4": "nvfp4", "nvfp4_tensor": "tensor",
}  # fmt: skip
"""Class of formats -> how a tensor core scales the codes; None in high precision."""
COLUMNWISE_ONLY = ("rht", "rht_signed")
"""Fields that a rowwise operand does not have: one text for both directions says them of the columnwise one."""
QUANTIZER_FIELDS = ("rowwise", "columnwise", "columnwise_source")
SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class FormatText:
    """A format as far as its text tells what may meet in a product (hqsweep.recipe.pairs)."""

    text: str
    scaling: str | None
    two_d: bool
    rht: bool
    rht_signed: bool

    @classmethod
    def parse(cls, text: str) -> "FormatText":
        """UserError as fields_of."""
        name, fields = fields_of(text)
        said = {"two_d": False, "rht": False, "rht_signed": True} | fields
        return cls(text.strip(), SCALINGS[NAMES[name][0]], said["two_d"], said["rht"], said["rht_signed"])

    @property
    def high_precision(self) -> bool:
        return self.scaling is None

    def __str__(self) -> str:
        return self.text


def directions(value: Any) -> tuple[str, str, str]:
    """The texts of rowwise and columnwise format and the source of a quantizer, as quantizer_texts takes it; what one
    text for both says of columnwise operands alone, is left out of the rowwise one.

    Raises:
        UserError: as quantizer_texts and fields_of do.
    """
    row, column, source = quantizer_texts(value)
    if column is not None:
        return row.strip(), column.strip(), source
    fields_of(row)
    name, words = words_of(row)
    said = OPTIONS[NAMES[name][0]]
    rowwise = [word for word in words if word not in said or not said[word].keys() <= set(COLUMNWISE_ONLY)]
    return "+".join([name, *rowwise]), row.strip(), source


_NUMBER = re.compile(r"([a-z]+)(\d+(\.\d*)?(e-?\d+)?)")


def fields_of(text: str) -> tuple[str, dict[str, object]]:
    """The name of a format's text, and the fields that name and options set.

    Raises:
        UserError: names the unknown part, the known one most like it, and what is allowed.
    """
    name, tokens = words_of(text)
    if name not in NAMES:
        raise UserError(f"format '{text}': unknown name '{name}'{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
    chosen: dict[str, object] = {}
    for token in tokens:
        for field, value in _fields(text, name, token).items():
            if field in chosen:
                raise UserError(f"format '{text}': option '+{token}' sets {field} a second time; give it once")
            chosen[field] = value
    return name, NAMES[name][1] | chosen


def words_of(text: str) -> tuple[str, list[str]]:
    """The name that a text begins with, known or not, with its second word if it has one; and the options."""
    name, *tokens = text.strip().split("+")
    second = next((token for token in tokens if f"{name}+{token}" in NAMES), None)
    if second is None:
        return name, tokens
    tokens.remove(second)
    return f"{name}+{second}", tokens


def options(name: str) -> list[str]:
    """Options that a format name takes, without the `+`."""
    family, fixed = NAMES[name]
    return [option for option, fields in OPTIONS[family].items() if not fields.keys() & fixed.keys()]


def _fields(text: str, name: str, token: str) -> dict[str, object]:
    family, allowed = NAMES[name][0], options(name)
    if token in allowed:
        return dict(OPTIONS[family][token])
    number, numbered = _NUMBER.fullmatch(token), NUMBERED.get(family, {})
    if number and number[1] in numbered:
        field, kind = numbered[number[1]]
        if kind is float or number[2].isdigit():
            return {field: kind(number[2])}
    allowed += [known.removeprefix(f"{name}+") for known in NAMES if known.startswith(f"{name}+")]
    takes = ", ".join([f"+{o}" for o in allowed] + [f"+{o}N" for o in numbered]) or "no options"
    raise UserError(f"format '{text}': unknown option '+{token}'{nearest(token, allowed)}; {name} takes {takes}")


def quantizer_texts(value: Any) -> tuple[str, str | None, str]:
    """The texts of rowwise and columnwise format (None where one text is for both), and the source, of a quantizer:
    "ROW|COL@SOURCE", or {rowwise, columnwise, columnwise_source} with the last one optional.

    Raises:
        UserError: for anything else, an unknown source included; what the formats' texts say is left to fields_of.
    """
    if isinstance(value, Mapping):
        row, column, source = _of_mapping(value)
    elif isinstance(value, str):
        formats, _, source = value.partition("@")
        row, bar, column = formats.partition("|")
        column = column if bar else None
    else:
        raise UserError(f"quantizer {value!r}: expected text such as 'mxfp8' or 'nvfp4|mxfp8', or a mapping")
    check_source(source or SOURCES[0])
    return row, column, source or SOURCES[0]


def check_source(source: str) -> None:
    """UserError for an unknown columnwise_source."""
    if source not in SOURCES:
        raise UserError(f"columnwise_source is '{source}'{nearest(source, SOURCES)}; allowed: {', '.join(SOURCES)}")


def _of_mapping(value: Mapping[str, Any]) -> tuple[str, str, str]:
    unknown = [key for key in value if key not in QUANTIZER_FIELDS]
    missing = [key for key in QUANTIZER_FIELDS[:2] if key not in value]
    if unknown or missing:
        wrong = f"unknown key '{unknown[0]}'{nearest(unknown[0], QUANTIZER_FIELDS)}" if unknown else ""
        wrong = wrong or f"'{missing[0]}' is missing"
        raise UserError(f"quantizer {dict(value)}: {wrong}; it takes rowwise, columnwise and columnwise_source")
    return str(value["rowwise"]), str(value["columnwise"]), str(value.get("columnwise_source", SOURCES[0]))
