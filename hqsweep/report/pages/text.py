"""Tables as ready text: one set of cells, written as rich or Markdown, each escaped for its own language.

A table for a terminal fits it: text wraps at words, columns go by priority, and a name or a number never breaks. Where
no column may go, the table continues below with its first column again. Columns without room are named below it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hqsweep.errors import visible

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


GAP = 2
"""The cells between two columns."""


@dataclass(kw_only=True)
class Fitted:
    """A table for a terminal of any width.

    header, rows   ready text
    numeric        the columns (by index) that are set right-aligned and never wrap
    styles         one style per row
    drop           headings of the columns that may go, the first one first
    caption        what stands below, as wide as the terminal
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    heading: str = ""
    styles: Sequence[str] | None = None
    drop: Sequence[str] = ()
    caption: Text | None = None
    _widths: list[tuple[int, int, bool]] = field(init=False)

    def __post_init__(self) -> None:
        self._widths = [self._measure(index) for index in range(len(self.header))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = self._shown(width)
        if self.heading:
            yield Text(self.heading, style="bold")
        for block in self._blocks(shown, width):
            yield self._table(block, width)
        if len(shown) < len(self.header):
            gone = [name for index, name in enumerate(self.header) if index not in shown]
            yield Text(f"no room in {width} columns: {', '.join(gone)}", style="dim")
        if self.caption is not None:
            yield self.caption

    def _measure(self, index: int) -> tuple[int, int, bool]:
        """(width of the column's longest line, width of its longest word, whether it has cells of several words); a
        number is one word."""
        cells = [line for row in self.rows for line in row[index].split("\n")]
        words = cells if index in self.numeric else [word for cell in cells for word in cell.split()]
        head = max(map(cell_len, self.header[index].split()), default=1)
        several = index not in self.numeric and any(" " in cell for cell in cells)
        longest = max(map(cell_len, words), default=0)
        natural = max([*map(cell_len, cells), head if index in self.numeric else cell_len(self.header[index])])
        return natural, max(longest, head), several

    def _least(self, index: int, width: int) -> int:
        """The narrowest that a column may be: its longest word, but at most half of the terminal in running text. Short
        names of rows do not wrap."""
        natural, word, several = self._widths[index]
        if index == 0 and natural <= width // 3:
            return natural
        return min(word, width // 2 if several else width)

    def _needs(self, columns: Sequence[int], width: int) -> int:
        return sum(self._least(index, width) for index in columns) + GAP * len(columns) - 1

    def _shown(self, width: int) -> list[int]:
        """The columns that are shown."""
        columns = list(range(len(self.header)))
        for name in self.drop:
            if self._needs(columns, width) <= width:
                break
            columns = [index for index in columns if self.header[index] != name]
        return columns

    def _blocks(self, columns: list[int], width: int) -> list[list[int]]:
        """The columns by the table in which they stand; each has the first one."""
        first, *rest = columns
        blocks = [[first]]
        for index in rest:
            if len(blocks[-1]) > 1 and self._needs([*blocks[-1], index], width) > width:
                blocks.append([first])
            blocks[-1].append(index)
        return blocks

    def _table(self, columns: Sequence[int], width: int) -> Table:
        shown = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for index, cells in zip(columns, self._share(columns, width), strict=True):
            justify = "right" if index in self.numeric else "left"
            shown.add_column(Text(self.header[index]), justify=justify, overflow="fold", width=cells)
        for place, row in enumerate(self.rows):
            shown.add_row(*(Text(row[index]) for index in columns), style=self.styles[place] if self.styles else None)
        return shown

    def _share(self, columns: Sequence[int], width: int) -> list[int]:
        """The width of each column: its own where there is room, else the widest ones give."""
        room = width - GAP * len(columns) + 1
        least = [self._least(index, width) for index in columns]
        natural = [self._widths[index][0] for index in columns]
        if sum(least) > room:  # a name that is too long for this terminal
            return [min(low, max(1, room // len(columns))) for low in least]
        cap = max(natural)
        while sum(shares := [max(low, min(own, cap)) for low, own in zip(least, natural, strict=True)]) > room:
            cap -= 1
        return shares


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
