"""The table of docs/performance.md: how fast whole steps are, from the rows of benchmarks/step.py. benchmarks.publish
writes it, and a test holds that it is that of the rows under reports/benchmarks."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.rows import ROOT, Row, markdown
from benchmarks.step_cases import RECIPES, SIZES

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- steps, by benchmarks.publish -->\n", "<!-- steps end -->\n"
FIRST = "recipe"
PLAIN = ("torch compiled", "torch eager")


def step_table(rows: Iterable[Row]) -> str:
    """Cases by size: the share of compiled torch's tokens a second, and milliseconds; then gigabytes at the peak."""
    shown = [row for row in rows if row["section"] == "time" and "share" in row and _as_by_default(row)]
    speed = _by_size(shown, lambda row: f"{row['share']:.2f}, {row['ms']:.1f} ms")
    memory = _by_size([row for row in shown if "peak_gb" in row], lambda row: f"{row['peak_gb']:.1f}")
    return f"{speed}\nGB at the peak of a step:\n\n{memory}"


def _as_by_default(row: Row) -> bool:
    return row.get("mode", "auto") == "auto" and row.get("deterministic", "on") == "on"


def _by_size(rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    cells: dict[str, Row] = {}
    for row in rows:
        cells.setdefault(str(row.get("recipe", row["case"])), {})[str(row["size"])] = cell(row)
    lines = [{FIRST: name} | cells[name] for name in PLAIN if name in cells]
    lines += [{FIRST: f"`{name}`"} | cells[name] for name in RECIPES if name in cells]
    return markdown(lines, (FIRST, *SIZES))


def write(rows: Iterable[Row], page: Path = PAGE) -> None:
    """Put the table between the marks of the page."""
    text = page.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(f"{text[:before]}\n{step_table(rows)}\n{text[after:]}")
