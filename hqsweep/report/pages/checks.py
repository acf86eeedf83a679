"""The tables of the jobs that check: the parity matrix, and measured decibels of calibrate beside the expected ones.

The parity matrix says what was compared with what, and PASS or the first mismatch. Checks of single formats make one
table, subject by check. A check whose subjects are pairs ("nvfp4|mxfp8") makes a
table of its own, row format by column format, one letter a cell. Below stand the first mismatches in full.
"""

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hqsweep.config.jobs import JOBS
from hqsweep.report.pages.text import TextTable, number, to_rich

PAIR = re.compile(r"([^|@]+)\|([^|@]+)(@.+)?")
MAX_DETAILS = 20
Row = Mapping[str, Any]


def matrix(rows: Sequence[Row]) -> RenderableType:
    """The tables, the first mismatches, and a last line with the counts. `rows` come from parity.jsonl."""
    singles, pairs = _sorted(rows)
    tables = [_grid("format", "parity", singles)] if singles else []
    tables += [part for title, cells in pairs.items() for part in _pair_grid(title, cells)]
    return Group(*tables, *_details(rows), Text(summary(rows)))


def text_tables(rows: Sequence[Row]) -> list[tuple[str, TextTable]]:
    """(title, table) of the same for pages: singles, pairs, first mismatches; none without rows."""
    singles, pairs = _sorted(rows)
    tables = [(f"Parity matrix ({summary(rows).removeprefix('parity: ')})", _text_grid(singles))] if singles else []
    for title, cells in pairs.items():
        tables.append((f"Parity matrix of {title}: row format by column format", _text_grid(cells)))
    failed = [row for row in rows if row["status"] == "FAIL"][:MAX_DETAILS]
    details = tuple((row["check"], row["subject"], str(row["case"]), first_mismatch(row)) for row in failed)
    if details:
        tables.append(("Parity: first mismatches", TextTable(header=("check", "of", "case", "what"), rows=details)))
    return tables


def first_mismatch(row: Row) -> str:
    """ "3 of 4096 differ, first at [0, 17]: got 0x7e, expected 0x7f; note" of one row, as far as it says so."""
    parts = []
    if row.get("mismatches"):
        where = f", first at {row['first_index']}" if row.get("first_index") is not None else ""
        parts.append(
            f"{row['mismatches']} of {row['total']} differ{where}: got {row.get('got')}, expected {row.get('expected')}"
        )
    return "; ".join([*parts, *filter(None, [row.get("note")])]) or row["status"]


def summary(rows: Sequence[Row]) -> str:
    """ "parity: 120 passed, 1 failed, 3 skipped"."""
    count = {status: sum(row["status"] == status for row in rows) for status in ("PASS", "FAIL", "SKIP")}
    return f"parity: {count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped"


def _sorted(
    rows: Sequence[Row],
) -> tuple[dict[tuple[str, str], list[Row]], dict[str, dict[tuple[str, str], list[Row]]]]:
    """Rows by (subject, check), and rows of pairs by title and (row format, column format)."""
    singles: dict[tuple[str, str], list[Row]] = {}
    pairs: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        pair = PAIR.fullmatch(row["subject"])
        if pair:
            title = row["check"] + (pair[3] or "")
            pairs.setdefault(title, {}).setdefault((pair[1], pair[2]), []).append(row)
        else:
            singles.setdefault((row["subject"], row["check"]), []).append(row)
    return singles, pairs


def _text_grid(cells: dict[tuple[str, str], list[Row]]) -> TextTable:
    lines, columns = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    rows = tuple((line, *(_cell(cells.get((line, column), [])).plain for column in columns)) for line in lines)
    return TextTable(header=("format", *columns), rows=rows).folded("format")


def _grid(corner: str, title: str, cells: dict[tuple[str, str], list[Row]]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    columns = list(dict.fromkeys(column for _, column in cells))
    for name in (corner, *columns):
        table.add_column(Text(name), overflow="fold")
    for line in dict.fromkeys(line for line, _ in cells):
        table.add_row(Text(line), *(_cell(cells.get((line, column), [])) for column in columns))
    return table


def _pair_grid(title: str, cells: dict[tuple[str, str], list[Row]]) -> list[RenderableType]:
    """One letter a pair, the column formats numbered: sixteen by sixteen pairs fit a terminal of 80 columns."""
    lines = list(dict.fromkeys(line for line, _ in cells))
    known = {column for _, column in cells}
    columns = [name for name in dict.fromkeys([*lines, *(column for _, column in cells)]) if name in known]
    legend = ", ".join(f"{place} {name}" for place, name in enumerate(columns, start=1))
    table = Table(padding=0)
    table.add_column(Text("row | column"), no_wrap=True)
    for place in range(1, len(columns) + 1):
        table.add_column(str(place), no_wrap=True, justify="center")
    for line in lines:
        table.add_row(Text(line), *(_letter(cells.get((line, column), [])) for column in columns))
    return [
        Text(f"{title}: row format | column format", style="bold"),
        table,
        Text(f"columns: {legend}; P pass, F fail, s skip\n", style="dim"),
    ]


def _letter(rows: Sequence[Row]) -> Text:
    statuses = {row["status"] for row in rows}
    if "FAIL" in statuses:
        return Text("F", style="bold red")
    return Text("P", style="green") if "PASS" in statuses else Text("s" if rows else "-", style="dim")


def _cell(rows: Sequence[Row]) -> Text:
    """PASS with the number of cases, or the number of failed cases with the place of the first mismatch."""
    failed = [row for row in rows if row["status"] == "FAIL"]
    passed = sum(row["status"] == "PASS" for row in rows)
    if failed:
        place = f" at {failed[0]['first_index']}" if failed[0].get("first_index") is not None else ""
        return Text(f"FAIL {len(failed)}/{len(failed) + passed}{place}", style="bold red")
    if passed:
        return Text("PASS" if passed == 1 else f"PASS {passed}", style="green")
    return Text("skip" if rows else "-", style="dim")


def _details(rows: Sequence[Row]) -> list[Text]:
    failed = [row for row in rows if row["status"] == "FAIL"]
    lines = [
        Text(f"FAIL {row['check']} {row['subject']} {row['case']}: {first_mismatch(row)}", style="red")
        for row in failed[:MAX_DETAILS]
    ]
    more = len(failed) - MAX_DETAILS
    return [*lines, Text(f"and {more} more failures", style="red")] if more > 0 else lines


Row = Mapping[str, Any]
SHORT = {"outlier_channels": "outliers", "token_scale_2": "token 2", "token_scale_4": "token 4"}


def tables(rows: Sequence[Row]) -> RenderableType:
    """SQNR, its distance from each source, rows' quantiles, products, students, failures, counts."""
    sqnr = [row for row in rows if row["check"] == "sqnr"]
    parts: list[RenderableType] = []
    if sqnr:
        parts.append(_by_distribution("SQNR (dB)", sqnr, lambda row: number(row["measured_db"], ".2f")))
        for source in dict.fromkeys(row["source"] for row in sqnr if row["source"]):
            part = [row for row in sqnr if row["source"] == source]
            parts.append(_by_distribution(f"less {source} (dB)", part, _distance))
        parts.append(_by_distribution("rows: median / 5th percentile (dB)", sqnr, _quantiles))
    medians = [row for row in rows if row["check"] == "row median"]
    if medians:
        parts.append(_by_distribution("rows: median less emulated (dB)", medians, _distance))
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


def _by_distribution(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> RenderableType:
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


def job_tables(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[RenderableType]:
    """Tables for a terminal of the rows of each job's table that has any."""
    printers = {kind.table: kind.printer for kind in JOBS.values()}
    return [pkgutil.resolve_name(printers[table])(part) for table, part in rows.items() if part]
