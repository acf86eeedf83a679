"""The formats that exist, as names and options, and the grammar of their texts; without torch.

A format's text is a name and options joined by `+`: "nvfp4+2d", "fp8_block+fp32_scale". A quantizer's text is
ROW|COL@SOURCE, or one format for both directions. A weight's may be project(GRID) > QUANTIZER: the weight is rounded to
the values of GRID, a format that checkpoints are deployed in, before it is quantized. Config checks texts here, before
torch is imported. hqsweep.formats makes Formats from the same tables, and docs and tests list formats from them. So a
new format is a Family here, and a class.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hqsweep.errors import UserError, nearest

Fields = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One class of formats, as far as texts name it."""

    module: str
    """The module of hqsweep.formats that has the class."""
    cls: str
    """The name of the class."""
    scaling: str | None
    """How a product scales the codes, as "tensor", "row", "block", "mx" or "nvfp4"; None in high precision."""
    names: Mapping[str, Fields]
    """Name -> the fields of the class that it fixes. A second word, as in "nvfp4+tensor", stands among the options."""
    options: Mapping[str, Fields] = field(default_factory=dict)
    """Option -> the fields that it sets. An option that sets a default, as +pow2 of fp8_block, is not canonical."""
    numbered: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    """Option that a number follows, such as "eps" in "eps16.0" -> its field, and the field's type."""
    fingerprint: tuple[str, ...] = ()
    """Texts in the fingerprint of a build (hqsweep.ops.fingerprint); FINGERPRINT changes with them."""


_RHT: dict[str, Fields] = {
    "rht": {"rht": 16},
    "rht32": {"rht": 32},
    "rht64": {"rht": 64},
    "rht128": {"rht": 128},
    "nosign": {"rht_signed": False},
}
_FOUR: dict[str, Fields] = _RHT | {"sr": {"sr": True}, "e1m2": {"element_name": "e1m2"}}
_MX_SCALES: dict[str, Fields] = {name: {"scale_rounding": name} for name in ("floor", "even", "ceil")}

IDENTITY = Family(
    module="identity", cls="Identity", scaling=None, names={name: {"name": name} for name in ("bf16", "fp16", "fp32")}
)
FP8_CURRENT = Family(
    module="fp8", cls="Fp8Current", scaling="tensor", names={"fp8_current": {}},
    options={"e5m2": {"element_name": "e5m2"}, "pow2": {"pow2": True}},
    numbered={"eps": ("amax_epsilon", float)},
    fingerprint=("fp8_current", "fp8_current+e5m2+pow2"),
)  # fmt: skip
FP8_DELAYED = Family(
    module="fp8", cls="Fp8Delayed", scaling="tensor", names={"fp8_delayed": {}},
    options={
        "e5m2": {"element_name": "e5m2"},
        "most_recent": {"most_recent": True},
        "local_amax": {"local_amax": True},
        "skip_nonfinite": {"skip_nonfinite": True},
    },
    numbered={"history": ("history", int)},
)  # fmt: skip
FP8_BLOCK = Family(
    module="fp8", cls="Fp8Block", scaling="block", names={"fp8_block": {}},
    options={
        "e5m2": {"element_name": "e5m2"},
        "2d": {"two_d": True},
        "pow2": {"pow2": True},
        "fp32_scale": {"pow2": False},
    },
    numbered={"eps": ("amax_epsilon", float)},
    fingerprint=("fp8_block", "fp8_block+2d+fp32_scale"),
)  # fmt: skip
FP8_ROW = Family(
    module="fp8", cls="Fp8Row", scaling="row", names={"fp8_row": {}},
    options={"pow2": {"pow2": True}},
    numbered={"eps": ("amax_epsilon", float)},
)  # fmt: skip
MX = Family(
    module="mx", cls="MX", scaling="mx",
    names={
        "mxfp8": {"name": "mxfp8"},
        "mxfp6_e2m3": {"name": "mxfp6_e2m3", "element_name": "e2m3"},
        "mxfp6_e3m2": {"name": "mxfp6_e3m2", "element_name": "e3m2"},
    },
    options={"e5m2": {"element_name": "e5m2"}, "2d": {"two_d": True}} | _MX_SCALES,
    fingerprint=("mxfp8", "mxfp8+e5m2+2d", "mxfp8+floor", "mxfp6_e2m3", "mxfp6_e3m2+even"),
)  # fmt: skip
MXFP4 = Family(
    module="mxfp4", cls="MXFP4", scaling="mx", names={"mxfp4": {}},
    options={"2d": {"two_d": True}} | _MX_SCALES | _FOUR,
    fingerprint=("mxfp4",),
)  # fmt: skip
NVFP4 = Family(
    module="nvfp4", cls="NVFP4", scaling="nvfp4", names={"nvfp4": {}},
    options={"2d": {"two_d": True}} | _FOUR | {
        "eden": {"eden": True},
        "row_scaled": {"row_scaled": True},
        "4over6": {"four_over_six": True},
        "mse": {"error_mode": "mse"},
        "fast_error": {"fast_error": True},
        "max448": {"e4m3_max": 448},
    },
    fingerprint=(
        "nvfp4", "nvfp4+2d+sr", "nvfp4+rht+sr", "nvfp4+row_scaled", "nvfp4+4over6+fast_error", "nvfp4+2d+4over6+mse",
    ),
)  # fmt: skip
NVFP4_TENSOR = Family(
    module="nvfp4_tensor", cls="NVFP4Tensor", scaling="tensor", names={"nvfp4+tensor": {}},
    options=_RHT | {"sr": {"sr": True}, "pow2": {"pow2": True}},
    fingerprint=("nvfp4+tensor", "nvfp4+tensor+rht+sr"),
)  # fmt: skip

INT8_ROW = Family(
    module="int8", cls="Int8Row", scaling="int_row", names={"int8_row": {}},
    options={"pow2": {"pow2": True}},
    numbered={"eps": ("amax_epsilon", float)},
)  # fmt: skip
INT8_BLOCK = Family(
    module="int8", cls="Int8Block", scaling="int_block", names={"int8_block": {}},
    options={"2d": {"two_d": True}, "pow2": {"pow2": True}},
    numbered={"eps": ("amax_epsilon", float)},
)  # fmt: skip
NVFP4_UE5M3 = Family(
    module="nvfp4_ue5m3", cls="NVFP4UE5M3", scaling="ue5m3", names={"nvfp4+ue5m3": {}},
    options={"2d": {"two_d": True}} | _FOUR,
)  # fmt: skip

FAMILIES = (
    IDENTITY, FP8_CURRENT, FP8_DELAYED, FP8_BLOCK, FP8_ROW, INT8_ROW, INT8_BLOCK, NVFP4_UE5M3, MX, MXFP4, NVFP4,
    NVFP4_TENSOR,
)  # fmt: skip
NAMES: dict[str, Family] = {name: family for family in FAMILIES for name in family.names}
"""Name -> its family."""
FINGERPRINT = "efe9481fa9da443f263ba55e89ae7d3fb70d8af9334c5095af96a6e9980a1110"
"""The hash of the reference over the fingerprint texts. Every correct kernel has the same."""
SET_COLUMNWISE = ("rht", "rht_signed", "eden")
"""Fields that one text for both directions sets for the columnwise operand only."""
QUANTIZER_FIELDS = ("rowwise", "columnwise", "columnwise_source")
SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class FormatText:
    """The facts in a format's text that decide which operands may meet in a product (hqsweep.recipe.pairs)."""

    text: str
    scaling: str | None
    two_d: bool
    rht: int
    rht_signed: bool
    rht_drawn: bool

    @classmethod
    def parse(cls, text: str) -> "FormatText":
        """Return the facts of a text. UserError as for fields_of()."""
        name, fields = fields_of(text)
        said = {"two_d": False, "rht": 0, "rht_signed": True, "eden": False} | fields
        return cls(
            text.strip(), NAMES[name].scaling, said["two_d"], said["rht"], said["rht_signed"], rht_drawn=said["eden"]
        )

    @property
    def high_precision(self) -> bool:
        return self.scaling is None

    def __str__(self) -> str:
        return self.text


# ---- formats -------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"([a-z]+)(\d+(\.\d*)?(e-?\d+)?)")


def fields_of(text: str) -> tuple[str, dict[str, object]]:
    """Return the name in a format's text, and the fields that name and options set.

    Raises:
        UserError: names the unknown part, the known one most like it, and what is allowed.
    """
    name, tokens = words_of(text)
    if name not in NAMES:
        raise UserError(f"format '{text}': unknown name '{name}'{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
    chosen: dict[str, object] = {}
    for token in tokens:
        for own, value in _fields(text, name, token).items():
            if own in chosen:
                raise UserError(f"format '{text}': option '+{token}' sets {own} a second time; give it once")
            chosen[own] = value
    return name, dict(NAMES[name].names[name]) | chosen


def words_of(text: str) -> tuple[str, list[str]]:
    """Return the name that a text begins with, known or not, second word included, and the options."""
    name, *tokens = text.strip().split("+")
    second = next((token for token in tokens if f"{name}+{token}" in NAMES), None)
    if second is None:
        return name, tokens
    tokens.remove(second)
    return f"{name}+{second}", tokens


def options(name: str) -> list[str]:
    """Return the options that a format name takes, without the `+`."""
    family = NAMES[name]
    return [option for option, fields in family.options.items() if not fields.keys() & family.names[name].keys()]


def _fields(text: str, name: str, token: str) -> Fields:
    family, allowed = NAMES[name], options(name)
    if token in allowed:
        return family.options[token]
    number = _NUMBER.fullmatch(token)
    if number and number[1] in family.numbered:
        own, kind = family.numbered[number[1]]
        if kind is float or number[2].isdigit():
            return {own: kind(number[2])}
    allowed += [known.removeprefix(f"{name}+") for known in NAMES if known.startswith(f"{name}+")]
    takes = ", ".join([f"+{o}" for o in allowed] + [f"+{o}N" for o in family.numbered]) or "no options"
    raise UserError(f"format '{text}': unknown option '+{token}'{nearest(token, allowed)}; {name} takes {takes}")


# ---- quantizers ----------------------------------------------------------------------------------------------------


def quantizer_texts(value: Any) -> tuple[str, str | None, str]:
    """Return the texts of rowwise and columnwise format (None: one text for both), and the source, of a quantizer.

    value: "ROW|COL@SOURCE", or {rowwise, columnwise, columnwise_source (optional)}.

    Raises:
        UserError: for anything else, and for an unknown source. fields_of() checks the formats' texts.
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


def directions(value: Any) -> tuple[str, str, str]:
    """Return the texts of rowwise and columnwise format, and the source, of a quantizer (see quantizer_texts).

    If one text is for both, the options of SET_COLUMNWISE are left out of the rowwise text.

    Raises:
        UserError: as quantizer_texts() and fields_of() do.
    """
    row, column, source = quantizer_texts(value)
    if column is not None:
        return row.strip(), column.strip(), source
    fields_of(row)
    name, words = words_of(row)
    said = NAMES[name].options
    rowwise = [word for word in words if word not in said or not said[word].keys() <= set(SET_COLUMNWISE)]
    return "+".join([name, *rowwise]), row.strip(), source


def check_source(source: str) -> None:
    """Raise UserError for an unknown columnwise_source."""
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


# ---- projections ---------------------------------------------------------------------------------------------------

PROJECT_FIELD = "project"
"""The key of the grid where a quantizer is a mapping."""
PROJECTION_GRIDS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4")
PROJECTION_HOSTS = ("mxfp8", "fp8_block")
_PROJECTION = re.compile(r"\s*project\s*\(([^()]*)\)\s*>(.*)", re.DOTALL)
_NO_GRID = {
    "sr": "its values are drawn anew at each use, and a checkpoint has one",
    "rht": "its values are transformed, and a weight is not",
    "row_scaled": "it is for rows of inputs",
}
"""Beginning of an option that a grid does not take -> the reason."""


def split_projection(value: Any) -> tuple[str | None, Any]:
    """Return the text of the grid, None without a projection, and the quantizer without it.

    value: a text, or a mapping with the key "project". UserError for a text that only begins as a projection.
    """
    if isinstance(value, Mapping) and PROJECT_FIELD in value:
        grid = value[PROJECT_FIELD]
        return None if grid is None else str(grid).strip(), {k: v for k, v in value.items() if k != PROJECT_FIELD}
    if not isinstance(value, str) or not value.lstrip().startswith(PROJECT_FIELD):
        return None, value
    found = _PROJECTION.fullmatch(value)
    if found is None:
        raise UserError(f"quantizer '{value}': a projection is project(GRID) > QUANTIZER, as in {_example()}")
    return found[1].strip(), found[2].strip()


def projection_text(grid: str, quantizer: str) -> str:
    """Return the text of a projection."""
    return f"{PROJECT_FIELD}({grid}) > {quantizer}"


def _example() -> str:
    return f"'{projection_text('mxfp4', 'mxfp8')}'"


def check_projection(grid: str, hosts: tuple[str, str]) -> None:
    """Raise UserError for a grid that is no narrower format, and for a host that has no power-of-two block scales.

    grid: the text of a format. hosts: the texts of both directions.
    """
    fields_of(grid)
    name, options = words_of(grid)
    if name not in PROJECTION_GRIDS:
        takes = ", ".join(PROJECTION_GRIDS)
        raise UserError(f"project({grid}): {name} is no grid that is narrower than its hosts; it takes {takes}")
    for option in options:
        reason = next((why for start, why in _NO_GRID.items() if option.startswith(start)), None)
        if reason:
            raise UserError(f"project({grid}): drop +{option}: {reason}")
    for host in hosts:
        fields = fields_of(host)[1]
        if words_of(host)[0] not in PROJECTION_HOSTS or fields.get("pow2") is False:
            raise UserError(
                f"project({grid}) > {host}: a host is mxfp8 or fp8_block, in both directions, with scales that are"
                " powers of two"
            )
