"""Cells and sparklines."""

import io
import math

import pytest
from rich.console import Console
from rich.text import Text

from hqsweep.report.pages.text import Fitted, TextTable, markdown, markdown_text, number, sparkline, text


def test_numbers_and_what_is_missing():
    assert [number(0.12345), number(math.nan), number(None), number(math.inf, ".1f")] == ["0.1235", "-", "-", "inf"]
    assert [text(2.0), text(2.5), text(None), text(math.nan), text("x"), text(True)] == [
        "2",
        "2.5",
        "-",
        "-",
        "x",
        "True",
    ]


def test_markdown_of_a_small_table():
    table = TextTable(header=("a", "b|c"), rows=(("x\ny", "1"),), numeric=frozenset({1}))
    assert markdown(table) == "| a | b\\|c |\n| --- | ---: |\n| x y | 1 |\n"


def test_markdown_shows_what_others_wrote_as_text():
    cell = "<b> | [a](x) ![i](y) `c` *d* ~~e~~ $f$ &amp; \\| \x1b[2J\u202e"
    assert markdown_text(cell) == (
        "&lt;b&gt; \\| \\[a\\](x) !\\[i\\](y) \\`c\\` \\*d\\* \\~\\~e\\~\\~ \\$f\\$ &amp;amp; \\\\\\|"
        " \\\\x1b\\[2J\\\\u202e"
    )


def test_sparkline_spans_low_to_high_and_marks_what_is_not_finite():
    assert sparkline([0.0, 1.0]) == "▁█" and sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([1.0, math.nan, math.inf, 0.0]) == "█!!▁"
    long = sparkline(list(range(1000)), width=10)
    assert len(long) == 10 and long[0] == "▁" and long[-1] == "█"


def test_equal_rows_are_folded_where_they_first_stand():
    rows = (("a", "x", "1"), ("b", "y", "1"), ("c", "x", "1"), ("a", "x", "2"))
    table = TextTable(header=("arm", "of", "n"), rows=rows, numeric=frozenset({2}))
    folded = table.folded("arm")
    assert folded.rows == (("a, c", "x", "1"), ("b", "y", "1"), ("a", "x", "2")) and folded.numeric == {2}
    assert folded.folded("n").rows == folded.rows and table.folded("of").rows == rows


NAMES = ("nvfp4_fwd_mxfp8_bwd-s0-at400-1f2e3d4c5b", "bf16-s11-at400-0123456789")
REASON = "loss is nan at step 37; lower train.lr, or look at the first steps of the run"
HEADER = ("run", "state", "step", "loss", "tokens/s", "reason")
ROWS = ((NAMES[0], "failed", "40/200", "2.5000", "9,500", REASON), (NAMES[1], "running", "7/200", "10.5", "800", "-"))
NUMERIC = frozenset({3, 4})


def shown(width, **fields):
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(**{"header": HEADER, "rows": ROWS, "numeric": NUMERIC, "heading": "2 runs"} | fields))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120, 200])
@pytest.mark.parametrize("drop", [(), ("tokens/s", "loss", "step")])
def test_names_and_numbers_are_whole_and_the_rest_wraps_at_words(width, drop):
    lines = shown(width, drop=drop)
    words = " ".join(lines).split()
    assert max(map(len, lines)) <= width
    assert {*NAMES, "failed", "running"} <= set(words)
    assert set(REASON.split()) <= set(words)
    gone = [name for name in HEADER if name not in " ".join(lines[:3] if drop else lines)]
    assert set(gone) <= set(drop)
    for index in {HEADER.index(name) for name in set(HEADER) - set(gone)}:
        assert all(row[index] in words for row in ROWS if " " not in row[index]), HEADER[index]


def test_columns_go_by_priority_and_are_named():
    assert "no room" not in shown(120, drop=("tokens/s", "loss", "step"))[-1]
    assert shown(80, drop=("tokens/s", "loss", "step"))[-1] == "no room in 80 columns: tokens/s"
    assert shown(72, drop=("tokens/s", "loss", "step"))[-1] == "no room in 72 columns: loss, tokens/s"


def test_without_a_column_to_drop_the_table_continues_below():
    names = [f"{number} format{number}" for number in range(1, 31)]
    header = ("operand", *map(str, range(1, 31)))
    lines = shown(80, header=header, rows=[(name, *("N" * 30)) for name in names], numeric=frozenset(), heading="pairs")
    heads = [line for line in lines if line.startswith("operand")]
    assert [number for line in heads for number in line.split()[1:]] == list(header[1:]) and len(heads) == 2
    assert sum(line.startswith("30 format30") for line in lines) == 2 and max(map(len, lines)) <= 80


def test_the_heading_and_the_caption_are_as_wide_as_the_terminal():
    lines = shown(100, rows=[["a"] * 6], heading="h" * 95, caption=Text("word " * 18))
    assert lines[0] == "h" * 95 and lines[-1] == ("word " * 18).strip()


@pytest.mark.parametrize("width", [5, 20, 41])
def test_a_terminal_that_is_narrower_than_a_name_breaks_it_and_loses_nothing(width):
    lines = shown(width, heading="")
    assert max(map(len, lines)) <= width
    first = "".join(line[: max(1, (width - 3) // 2)].strip() for line in lines)
    assert all(name in first for name in NAMES)
