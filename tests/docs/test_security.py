"""docs/security.md is true: every point has a test, and each is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)::(\w+)`", TEXT)))


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    assert NAMED
    assert [f"{path}::{name}" for path, name in NAMED if name not in functions(path)] == []


def test_every_point_between_what_is_trusted_and_what_is_not_defended_has_a_test() -> None:
    sections = TEXT.split("\n## ")
    assert (sections[1].splitlines()[0], sections[-1].splitlines()[0]) == ("Trusted", "Not defended against")
    points = [point for section in sections[2:-1] for point in section.split("\n- ")[1:]]
    assert points and not [point for point in points if "`tests/" not in point]
