"""docs/judge.md, docs/track.md and docs/ladder.md are true: their files are written, their commands and their Python
run, and print what the pages say.

```csv NAME, ```py NAME  are files
```text                  is the output of the block before it
"""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(kind, name, text) of the blocks of a page."""
    return re.findall(r"```(\w+) ?([\w.]*)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def printed(kind: str, text: str) -> str:
    """What a block prints."""
    if kind == "python":
        with redirect_stdout(StringIO()) as output:
            exec(text, {})
        return output.getvalue()
    result = CliRunner().invoke(app, shlex.split(text.removeprefix("hqsweep ").replace("\\\n", " ")))
    assert result.exit_code == 0, result.output
    return result.output


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.parametrize(("page", "texts"), [("judge.md", 6), ("track.md", 2), ("ladder.md", 1)])
def test_the_page_prints_what_it_says(page: str, texts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    last, compared = "", 0
    for kind, name, text in blocks(page):
        if name:
            (tmp_path / name).write_text(text)
        elif kind == "text":
            assert plain(text) == plain(last)
            compared += 1
        elif kind != "py":
            last = printed(kind, text)
    assert compared == texts


def test_the_tables_of_the_page_are_examples() -> None:
    tables = {name: text for kind, name, text in blocks("judge.md") if kind == "csv"}
    assert tables == {path.name: path.read_text() for path in (ROOT / "examples/judge").glob("*.csv")}
    assert len(tables) == 2
