"""Tables as ready text: one set of cells, written as rich or Markdown. Each writer escapes them for its own
language.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hqsweep.errors import visible
from hqsweep.report.pages.fitted import Fitted

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A header and rows of ready text; `numeric` columns (by index) are set right-aligned."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()

    def without(self, *names: str) -> "TextTable":
        """The table less the columns of these headings."""
        places = [index for index, name in enumerate(self.header) if name not in names]
        rows = tuple(tuple(row[index] for index in places) for row in self.rows)
        numeric = frozenset(new for new, old in enumerate(places) if old in self.numeric)
        return TextTable(header=tuple(self.header[index] for index in places), rows=rows, numeric=numeric)

    def transposed(self, corner: str) -> "TextTable":
        """Columns as rows; `corner` heads the old header, which is the first column."""
        names, *columns = zip(self.header, *self.rows, strict=True)
        return TextTable(header=(corner, *names[1:]), rows=tuple(columns))

    def folded(self, name: str) -> "TextTable":
        """Rows that are equal but for the column of this heading as one row, its cells separated by commas."""
        place = self.header.index(name)
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            groups.setdefault((*row[:place], *row[place + 1 :]), []).append(row[place])
        rows = tuple((*rest[:place], ", ".join(dict.fromkeys(cells)), *rest[place:]) for rest, cells in groups.items())
        return TextTable(header=self.header, rows=rows, numeric=self.numeric)

    def column(self, name: str) -> set[str]:
        """The different cells of a column."""
        return {row[self.header.index(name)] for row in self.rows}


def number(value: object, spec: str = ".4f", missing: str = "-") -> str:
    """A float by `spec`, "-" for none or NaN, "inf" as it is."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return missing
    return format(value, spec)


def text(value: object) -> str:
    """A cell's text: "-" for nothing, whole floats without ".0" (pandas makes integers with gaps into floats)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def markdown(table: TextTable) -> str:
    """A GitHub table; cells cannot end a cell, a row, or start HTML."""
    rule = ["---:" if column in table.numeric else "---" for column in range(len(table.header))]
    lines = [table.header, rule, *table.rows]
    plain = [rule if line is rule else [markdown_text(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in plain)


def markdown_text(cell: str) -> str:
    """Text that Markdown shows as it is, GitHub's formulas and strikethrough included."""
    cell = visible(" ".join(cell.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\|`*_[]~$":
        cell = cell.replace(mark, "\\" + mark)
    return cell


def legal(xml: str) -> str:
    """`xml` with a question mark for every control character that XML 1.0 has no way to write."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", xml)


def to_rich(table: TextTable, heading: str, styles: Sequence[str] | None = None, drop: Sequence[str] = ()) -> Fitted:
    """Any TextTable for a terminal; `styles` holds one style per row, `drop` the headings that may go, first one
    first."""
    cells = {"header": table.header, "rows": table.rows, "numeric": table.numeric}
    return Fitted(**cells, heading=heading, styles=styles, drop=drop)


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Values as bars between their own lowest and highest, at most `width` of them evenly spaced; "!" for NaN and
    inf."""
    count = min(width, len(values))
    shown = [values[index * (len(values) - 1) // max(1, count - 1)] for index in range(count)]
    finite = [value for value in shown if math.isfinite(value)]
    low, span = (min(finite), (max(finite) - min(finite)) or 1.0) if finite else (0.0, 1.0)
    return "".join(
        BARS[round((value - low) / span * (len(BARS) - 1))] if math.isfinite(value) else "!" for value in shown
    )
