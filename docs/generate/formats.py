"""docs/reference/formats.md: codes to the bit, scales, buffers, options and arithmetic of every format."""

import dataclasses
import inspect
import sys

from docs.generate.source import docstring, field_texts, table
from hqsweep.formats import NAMES, WHOLE, Buffer, Format, Identity, eden, hadamard, options, parse
from hqsweep.formats.elements import ELEMENTS, Element

INTRO = """\
# Formats

A format's text is a name and options joined by `+`, as in `nvfp4+2d`; a tensor's two directions are written
`ROWWISE|COLUMNWISE@SOURCE`, as in `nvfp4|mxfp8@rowwise_dequantized`.

## Codes

Bits from the highest to the lowest: S sign, E exponent, M mantissa. With exponent field e > 0 and mantissa field m,
value = (-1)^S * 2^(e - bias) * (1 + m / 2^mantissa bits); with e = 0 it is (-1)^S * 2^(1 - bias) * m / 2^mantissa bits.
"""
NIBBLES = (
    "4-bit codes lie two to a byte, the even index in the low nibble; 6-bit codes one to a byte, in its low bits.\n"
)
E8M0 = "E8M0, the scale of the MX formats, is eight exponent bits: 2^(code - 127); 255 is NaN.\n"


def page() -> str:
    rows = [_element(element) for element in ELEMENTS.values()]
    header = ("element", "bits", "bias", "largest", "smallest normal", "smallest subnormal", "NaN becomes", "inf")
    parts = [INTRO, table(header, rows), NIBBLES, E8M0, "### All codes of 4 bits\n", _codes(ELEMENTS["e2m1"])]
    parts += [
        "## Formats\n",
        table(("format", "bits an element, scales included", "buffers"), [_summary(name) for name in NAMES]),
    ]
    for cls in dict.fromkeys(type(parse(name)) for name in NAMES):
        parts += _format(cls)
    for module, options_ in ((hadamard, "+rht"), (eden, "+eden")):
        parts += [f"### {options_}\n", docstring(module)]
    return "\n".join(parts)


def _element(e: Element) -> tuple[str, ...]:
    layout = f"S {'E' * e.exponent_bits} {'M' * e.mantissa_bits}"
    values = e.values()
    inf = ", ".join(f"0x{code:02X}" for code in range(len(values)) if values[code].isinf()) or "none"
    return (
        e.name.upper(), layout, str(1 - e.min_exponent), f"{e.max:g}", f"2^{e.min_exponent}",
        f"2^{e.min_exponent - e.mantissa_bits}", f"0x{e.nan_code:02X}", f"{inf}; encode saturates",
    )  # fmt: skip


def _codes(e: Element) -> str:
    half = e.values()[: 2 ** (e.bits - 1)].tolist()
    return table(("code", *(f"{code:04b}" for code in range(len(half)))), [("value", *(f"{v:g}" for v in half))])


def _summary(name: str) -> tuple[str, str, str]:
    format = parse(name)
    scales = sum(
        _bits(b) / (b.rows * b.cols) for n, b in format.layout.items() if n != "q" and WHOLE not in (b.rows, b.cols)
    )
    return name, f"{format.element_bits + scales:g}", "; ".join(f"{n}: {_buffer(b)}" for n, b in format.layout.items())


def _buffer(buffer: Buffer) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    if buffer.rows == buffer.cols == WHOLE:
        return f"one {dtype} for the tensor"
    rows, cols = ("all" if size == WHOLE else str(size) for size in (buffer.rows, buffer.cols))
    return f"{dtype} for {rows} x {cols}"


def _bits(buffer: Buffer) -> int:
    return buffer.dtype.itemsize * 8


def _format(cls: type[Format]) -> list[str]:
    names = [name for name in NAMES if type(parse(name)) is cls]
    parts = [f"### {', '.join(names)}\n", docstring(sys.modules[cls.__module__])]
    parts += [inspect.getdoc(cls), ""]
    return [*parts, table(("option", "sets", "buffers with it", "what it is"), _options(cls, names[0]))]


def _options(cls: type[Format], name: str) -> list[tuple[str, ...]]:
    if cls is Identity:
        return []
    said, defaults, rows = field_texts(cls), {f.name: f.default for f in dataclasses.fields(cls)}, []
    for option in options(name):
        changed = cls.family.options[option]
        sets = ", ".join(f"{field}={value}" for field, value in changed.items())
        rows.append((f"+{option}", sets, _changed_buffers(name, option), " ".join(said.get(f, "") for f in changed)))
    for option, (field, _) in cls.family.numbered.items():
        rows.append((f"+{option}N", f"{field}=N (default {defaults[field]})", "", said.get(field, "")))
    return rows


def _changed_buffers(name: str, option: str) -> str:
    """Those that the option lays out otherwise; options that need another one are shown alone."""
    try:
        changed = parse(f"{name}+{option}").layout
    except ValueError:
        return ""
    plain = parse(name).layout
    return "; ".join(f"{n}: {_buffer(b)}" for n, b in changed.items() if b != plain[n])
