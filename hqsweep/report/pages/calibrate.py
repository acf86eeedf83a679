"""The tables of the calibrate job: measured decibels beside what they should be, and what is off in full."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep.report.pages.text import TextTable, number, to_rich

Row = Mapping[str, Any]
SHORT = {"outlier_channels": "outliers", "token_scale_2": "token 2", "token_scale_4": "token 4"}


def tables(rows: Sequence[Row]) -> RenderableType:
    """SQNR, its distance from each source, rows' quantiles, products, students, failures, counts."""
    sqnr = [row for row in rows if row["check"] == "sqnr"]
    parts: list[RenderableType] = []
    if sqnr:
        parts.append(_grid("SQNR (dB)", sqnr, lambda row: number(row["measured_db"], ".2f")))
        for source in dict.fromkeys(row["source"] for row in sqnr if row["source"]):
            part = [row for row in sqnr if row["source"] == source]
            parts.append(_grid(f"less {source} (dB)", part, _distance))
        parts.append(_grid("rows: median / 5th percentile (dB)", sqnr, _quantiles))
    medians = [row for row in rows if row["check"] == "row median"]
    if medians:
        parts.append(_grid("rows: median less emulated (dB)", medians, _distance))
    parts += [
        _predicted(title, part)
        for check, title in (("gemm", "products of a Linear"), ("teacher", "students of a linear teacher"))
        if (part := [row for row in rows if row["check"] == check])
    ]
    failed = [
        Text(f"FAIL {row['check']} {row['subject']} {row['case']}: {row['note']}", style="red")
        for row in rows
        if row["status"] == "FAIL"
    ]
    count = {status: sum(row["status"] == status for row in rows) for status in ("PASS", "FAIL", "SKIP")}
    line = f"calibrate: {count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} with nothing to compare with"
    return Group(*parts, *failed, Text(line))


def _grid(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> RenderableType:
    """Format by distribution."""
    cells = {(row["subject"], row["case"]): cell(row) for row in rows}
    columns = list(dict.fromkeys(case for _, case in cells))
    lines = tuple(
        (subject, *(cells.get((subject, case), "-") for case in columns))
        for subject in dict.fromkeys(subject for subject, _ in cells)
    )
    header = ("format", *(SHORT.get(name, name) for name in columns))
    return to_rich(TextTable(header=header, rows=lines, numeric=frozenset(range(1, len(header)))), title)


def _distance(row: Row) -> str:
    """ "+0.01", and " !" where it is too far."""
    return f"{row['measured_db'] - row['expected_db']:+.2f}{' !' if row['status'] == 'FAIL' else ''}"


def _quantiles(row: Row) -> str:
    return f"{number(row['row_sqnr_db_median'], '.1f')} / {number(row['row_sqnr_db_p5'], '.1f')}"


def _predicted(title: str, rows: Sequence[Row]) -> RenderableType:
    lines = tuple(
        (
            row["subject"],
            row["case"],
            number(row["measured_db"], ".2f"),
            number(row["expected_db"], ".2f", "inf"),
            f"{number(row['low_db'], '.2f')} to {number(row['high_db'], '.2f', 'inf')}",
            row["status"],
        )
        for row in rows
    )
    header = ("recipe", "of", "measured (dB)", "predicted", "passes", "verdict")
    table = TextTable(header=header, rows=lines, numeric=frozenset({2, 3}))
    return to_rich(table, title, ["bold red" if row["status"] == "FAIL" else "" for row in rows])
