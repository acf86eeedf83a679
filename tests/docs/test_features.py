"""tests/FEATURES.md names the tests with marks of its features, and leaves out no feature that is required."""

import re

from docs.generate.features import MISSING, PAGE, features

SHOWN, PARTS = PAGE.read_text().split(MISSING)
HYBRID = (*range(1, 73), *range(95, 101), *range(122, 126), 133, 134, *range(142, 146))
"""Features of the hybrid quantization system: none may lack a row."""


def rows_of(text: str) -> tuple[list[str], list[str]]:
    """The rows of features, and the numbers in their first columns."""
    rows = [line for line in text.splitlines() if re.match(r"\| [A-Z]\d", line)]
    return rows, [number for row in rows for number in re.findall(r"[A-Z]\d+", row.split("|")[1])]


def test_the_page_is_not_stale() -> None:
    assert features() == PAGE.read_text(), "tests/FEATURES.md is stale; run `make docs`"


def test_a_feature_has_one_row() -> None:
    rows, numbers = rows_of(SHOWN)
    assert len(rows) == len([row for row in rows if "`tests/" in row])
    assert len(numbers) == len(set(numbers))
    assert {f"F{i}" for i in HYBRID} <= {*numbers, *rows_of(PARTS)[1]}


def test_a_missing_feature_points_to_rows_that_are_there() -> None:
    rows, missing = rows_of(PARTS)
    for row in rows:
        assert not re.search("`tests/", row)
        assert set(re.findall(r"row of (F\d+)", row)) <= set(rows_of(SHOWN)[1])
    assert "F69" in missing
    assert not {"F69", "T19", "T28"} & set(rows_of(SHOWN)[1])
