"""docs/query.md and docs/SKILL.md are true: each command that they show runs, and so does the Python."""

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from hqsweep.cli.answers import ANSWERS, schema
from hqsweep.cli.main import app
from hqsweep.queries.index import FACTS
from tests.report.conftest import three_arms, write_sweep

DOCS = Path(__file__).parents[2] / "docs"
QUERY, SKILL = (DOCS / "query.md").read_text(), (DOCS / "SKILL.md").read_text()


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "runs/study", three_arms())
    rows = [f"{arm},{seed},{2 + gap + seed / 100}" for arm, gap in (("bf16", 0), ("fp8", 0.01)) for seed in range(3)]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,val_loss", *rows]) + "\n")


@pytest.mark.parametrize("command", commands(QUERY) + commands(SKILL))
def test_each_command_runs(command: str) -> None:
    words = shlex.split(command)
    result = CliRunner().invoke(app, words[1:])
    code = 3 if words[1] == "verify" else 0  # the runs of this test have ids of no config
    assert words[0] == "hqsweep" and result.exit_code == code, result.output
    if "--json" in words:
        jsonschema.validate(json.loads(result.stdout), schema(words[1]))


def test_the_skill_has_five_recipes_and_every_exit_code() -> None:
    assert len(re.findall(r"^## ", SKILL, re.M)) == 5 and all(f"\n| {code} | " in SKILL for code in range(5))
    front = yaml.safe_load(SKILL.split("---\n")[1])
    assert front["name"] == "hqsweep" and 80 < len(front["description"]) < 1024


def test_the_skill_names_commands_that_exist() -> None:
    row = next(line for line in SKILL.splitlines() if line.startswith("| `ls`"))
    known = {command.split()[0] for command in ANSWERS} | set(ANSWERS)
    assert {name.split(" --")[0] for name in re.findall(r"`([^`]+)`", row)} <= known


def test_the_python_runs_and_the_facts_are_all() -> None:
    exec(re.search(r"```python\n(.*?)```", QUERY, re.DOTALL)[1], {})
    said = set(re.findall(r"`(\w+)`", QUERY.partition("Facts are")[2].partition(". All tables")[0]))
    assert said == set(FACTS) - {"step"}
