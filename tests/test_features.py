"""tests/FEATURES.md is true: the tests that it names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)::(\w+)`", (ROOT / "tests/FEATURES.md").read_text())))


HYBRID = (*range(1, 73), *range(95, 101), *range(122, 126), 133, 134, *range(142, 146))
"""Features of the hybrid quantization system: none may lack a row."""


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[f"{Path(path).stem}::{name}" for path, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name.startswith("test_") and name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_a_feature_has_one_row() -> None:
    rows = [line for line in (ROOT / "tests/FEATURES.md").read_text().splitlines() if re.match(r"\| [FT]\d", line)]
    numbers = [number for row in rows for number in re.findall(r"[FT]\d+", row.split("|")[1])]
    assert len(rows) == len([row for row in rows if "`tests/" in row]) and len(numbers) == len(set(numbers))
    assert {f"F{i}" for i in HYBRID} <= set(numbers)
