"""A table that fits its terminal: text wraps at words, columns go by priority, and a name or a number never breaks.

Where nothing may go, the table continues below with its first column again. What a narrow terminal does not show is
named below the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

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
