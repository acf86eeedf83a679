"""The tutorial is true: its files are written and its commands run, one after the other, in one empty folder.

```sh        runs as it stands
```sh tiny   runs with TINY, which makes trainings short
```sh dry    composes: `hqsweep run` gets --dry-run
"""

import re
import shlex
import subprocess
from glob import glob
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
TINY = [
    "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2", "train.batch=2", "train.context=32",
    "train.eval_batches=1", "stats.every=0", "engine.workers=2",
]  # fmt: skip
BLOCKS = re.findall(r"```(\w+) ?(\w*)\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_tutorial_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GITHUB_STEP_SUMMARY", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    ran = 0
    for kind, how, text in BLOCKS:
        if kind == "yaml" and (named := re.match(r"# (\S+)\n", text)):
            Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(named[1]).write_text(text)
        for line in re.findall(r"^hqsweep (.*)$", text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            ran += call([path for word in words for path in sorted(glob(word)) or [word]], how)
    assert ran >= 20
    assert (tmp_path / "reports/first/report.html").is_file() and "def qfactory" in (tmp_path / "mine.py").read_text()


def call(words: list[str], how: str) -> int:
    """Run a command, which must end well; returns 1."""
    if words[0] == "run" and how == "tiny":
        less = {"train.steps": 4, "seed": 0, "stats.capture_at": 4, "stats.every": 2}
        keys = [word.partition("=")[0] for word in words]
        words = [f"{key}={less[key]}" if key in less else word for key, word in zip(keys, words, strict=True)]
        words += [word for word in TINY if word.partition("=")[0] not in keys]
    elif words[0] == "run" and how == "dry":
        words = [*words, "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"hqsweep {shlex.join(words)}: {result.output}"
    return 1


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_commands_of_the_docs_are_words_to_a_shell() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for line in re.findall(r"^(?:    |)hqsweep .*$", page.read_text(), re.MULTILINE):
            parsed = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
            assert parsed.returncode == 0, f"{page.name}: {line}: {parsed.stderr}"
