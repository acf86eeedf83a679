"""docs/development.md is true: its map has every package, and its walk names functions of the files beside them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/development.md").read_text()


def test_the_map_has_every_package():
    section = TEXT.split("## Map\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w/]+)` \|", section, re.MULTILINE)
    packages = {str(path.parent.relative_to(ROOT / "hqsweep")) for path in (ROOT / "hqsweep").rglob("__init__.py")}
    assert len(listed) == len(set(listed)) and set(listed) == packages - {"."}


def test_the_walk_names_functions_that_are_there():
    section = TEXT.split("## One linear")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    sources = ""
    for _, file, functions, *_ in rows:
        sources = (ROOT / file.strip(" `")).read_text() if file.strip() else sources
        for name in re.findall(r"`([\w.]+)`", functions):
            assert all(re.search(rf"\b{part}\b", sources) for part in name.split(".")), (file, name)
