"""The README is true: its sweeps compose, its commands and options exist, its paths are there."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.formats import options, parse
from hqsweep.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text().replace("\\\n", " ")
COMMANDS = [line.split(" #")[0].strip() for line in README.splitlines() if line.startswith("    hqsweep ")]


@pytest.mark.parametrize("command", [c for c in COMMANDS if " run " in c])
def test_sweeps_compose(command):
    result = CliRunner().invoke(
        app, [*shlex.split(command)[1:], *(["--dry-run"] if "--dry-run" not in command else [])]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [c for c in COMMANDS if " run " not in c])
def test_commands_and_their_options_exist(command):
    _, name, *words = shlex.split(command)
    path = [] if name.startswith("-") else [name, *words[: name in ("recipe", "baseline")]]
    shown = CliRunner().invoke(app, [*path, "--help"]).output
    assert shown and all(word in shown for word in (name, *words) if word.startswith("--")), command


def test_targets_and_paths_exist():
    targets = set(re.findall(r"`?make ([a-z-]+)", README))
    makefile = (ROOT / "Makefile").read_text()
    assert {"quickstart", "test", "gpu-test"} <= targets and all(f"\n{t}:" in makefile for t in targets)
    for path in re.findall(r"`((?:hqsweep|csrc|tests|reports)/[^`]*)`", README):
        assert (ROOT / path).exists(), path


def test_the_recipe_shown_is_valid():
    block = README[README.index("    recipe:\n") :].split("\n\n")[0]
    recipe = parse_recipe(yaml.safe_load(block)["recipe"])
    assert recipe.schedule and len(recipe.overrides) == 2


def test_formats_and_options_of_the_table_exist():
    rows = [line.split("|") for line in README.splitlines() if re.match(r"\| `[a-z]", line)]
    named = {name: re.findall(r"\+(\w+)", row[4]) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert len(named) == 11
    for name, listed in named.items():
        parse(name)
        assert set(listed) <= set(options(name)), name


def test_the_python_shown_runs():
    code = README.split("## From Python\n\n")[1].split("\n\n`hqsweep.nn` has")[0]
    names = {}
    exec(compile(textwrap.dedent(code), "README.md", "exec"), names)
    assert names["y"].isfinite().all() and str(names["layer"].mlp.fc1.quantizers.input) == "bf16"
