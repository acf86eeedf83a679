"""tests/FEATURES.md is true: the tests that it names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWN, MISSING = (ROOT / "tests/FEATURES.md").read_text().split("## Not there, or only in part")
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)::(\w+)`", SHOWN)))


HYBRID = (*range(1, 73), *range(95, 101), *range(122, 126), 133, 134, *range(142, 146))
"""Features of the hybrid quantization system: none may lack a row."""


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[f"{Path(path).stem}::{name}" for path, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name.startswith("test_") and name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def rows_of(text: str) -> tuple[list[str], list[str]]:
    """The rows of features, and the numbers in their first columns."""
    rows = [line for line in text.splitlines() if re.match(r"\| [FT]\d", line)]
    return rows, [number for row in rows for number in re.findall(r"[FT]\d+", row.split("|")[1])]


def test_a_feature_has_one_row() -> None:
    rows, numbers = rows_of(SHOWN)
    assert len(rows) == len([row for row in rows if "`tests/" in row]) and len(numbers) == len(set(numbers))
    assert {f"F{i}" for i in HYBRID} <= {*numbers, *rows_of(MISSING)[1]}


def test_a_missing_feature_points_to_rows_that_are_there() -> None:
    rows, missing = rows_of(MISSING)
    for row in rows:
        assert not re.search("`tests/", row) and set(re.findall(r"row of (F\d+)", row)) <= set(rows_of(SHOWN)[1])
    assert "F69" in missing and not {"F69", "T19", "T28"} & set(rows_of(SHOWN)[1])
