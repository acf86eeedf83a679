"""Cells and sparklines."""

import math

from hqsweep.report.pages.text import TextTable, markdown, markdown_text, number, sparkline, text


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
