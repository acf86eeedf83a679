"""The tests of each feature in tests/FEATURES.md, from their marks: `@pytest.mark.feature("F32")`.

The sections and the first two columns of its tables are written by hand; the third column is the tests with a mark of
one of the row's numbers. `pytestmark = pytest.mark.feature("F32")` marks all tests of a file.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests/FEATURES.md"
ROW = re.compile(r"\| ([A-Z]\d+(?:, [A-Z]\d+)*) \| (.+) \| ([^|]*) \|")
MISSING = "## Not there, or only in part"


def features() -> str:
    """The text of tests/FEATURES.md.

    Raises ValueError for a number without a test, and for marks without a row.
    """
    shown, missing = PAGE.read_text().split(MISSING)
    tests = marked()
    lines, left = [], set(tests)
    for line in shown.splitlines():
        row = ROW.fullmatch(line)
        if row:
            numbers = row[1].split(", ")
            if unmarked := [number for number in numbers if number not in tests]:
                raise ValueError(f"no test has the mark of {unmarked}, of a row of {PAGE.name}")
            named = dict.fromkeys(name for number in numbers for name in tests[number])
            left -= set(numbers)
            line = f"| {row[1]} | {row[2]} | {', '.join(sorted(named))} |"
        lines.append(line)
    if left:
        raise ValueError(f"{PAGE.name} has no rows of {sorted(left)}: {[tests[number] for number in sorted(left)]}")
    return "\n".join(lines) + "\n" + MISSING + missing


def marked() -> dict[str, list[str]]:
    """Number of a feature -> the tests that have its mark, or all of a file."""
    tests = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(text)) if "mark.feature(" in text else ():
            if isinstance(node, ast.FunctionDef):
                for number in (n for decorator in node.decorator_list for n in numbers_of(decorator)):
                    tests[number].append(f"`{name}::{node.name}`")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                for number in numbers_of(node.value):
                    tests[number].append(f"all of `{name}`")
    return tests


def numbers_of(marks: ast.expr) -> Iterator[str]:
    """The arguments of each call of pytest.mark.feature inside an expression."""
    for node in ast.walk(marks):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.feature":
            yield from (ast.literal_eval(argument) for argument in node.args)
