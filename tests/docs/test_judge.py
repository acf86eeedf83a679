"""docs/judge.md is true: its table is written, its commands and its Python run, and print what the page says.

```csv NAME  is a file
```text      is the output of the block before it
"""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app

PAGE = Path(__file__).parents[2] / "docs/judge.md"
BLOCKS = re.findall(r"```(\w+) ?([\w.]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def printed(kind: str, text: str) -> str:
    """What a block prints."""
    if kind == "python":
        with redirect_stdout(StringIO()) as output:
            exec(text, {})
        return output.getvalue()
    result = CliRunner().invoke(app, shlex.split(text.removeprefix("hqsweep ")))
    assert result.exit_code == 0, result.output
    return result.output


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    last, compared = "", 0
    for kind, name, text in BLOCKS:
        if kind == "csv":
            (tmp_path / name).write_text(text)
        elif kind == "text":
            assert plain(text) == plain(last)
            compared += 1
        else:
            last = printed(kind, text)
    assert compared == 3
