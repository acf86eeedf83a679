"""The README and the pages of docs/ are true: sweeps compose, commands, options, targets and paths exist, code runs."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.formats import options, parse
from hqsweep.recipe import CustomRecipe, QuantizerRole, parse_recipe

ROOT = Path(__file__).parents[1]
# docs/tutorial.md is run as a whole by tests/docs, docs/reference is compared with the code there
PAGES = {path.name: path.read_text() for path in [*(ROOT / "docs").glob("*.md"), ROOT / "docs/ci/README.md"]}
PAGES["README.md"] = (ROOT / "README.md").read_text()
COMMANDS = sorted(
    {
        line.split(" #")[0].strip()
        for name, page in PAGES.items()
        if name != "tutorial.md"
        for line in page.splitlines()
        if line.startswith("    hqsweep ")
    }
)


@pytest.mark.parametrize("command", [c for c in COMMANDS if " run " in c])
def test_sweeps_compose(command):
    result = CliRunner().invoke(
        app, [*shlex.split(command)[1:], *(["--dry-run"] if "--dry-run" not in command else [])]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.feature("F145")
@pytest.mark.parametrize("command", [c for c in COMMANDS if " run " not in c])
def test_commands_and_their_options_exist(command):
    _, name, *words = shlex.split(command)
    path = [] if name.startswith("-") else [name, *words[: name in ("recipe", "baseline", "data")]]
    shown = CliRunner().invoke(app, [*path, "--help"]).output
    assert shown and all(word in shown for word in (name, *words) if word.startswith("--")), command


@pytest.mark.feature("F145")
@pytest.mark.parametrize("name", PAGES)
def test_targets_and_paths_exist(name):
    page, makefile = PAGES[name], (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|    )make ([a-z0-9-]+)", page):
        assert f"\n{target}:" in makefile, target
    for path in re.findall(r"`((?:hqsweep|csrc|tests|reports/benchmarks|benchmarks|conf|docs)/[^`*{ ]*)`", page):
        if "NAME" not in path and path not in ("conf/mine.yaml", "conf/recipe/mine.yaml", "conf/my_module.py"):
            assert (ROOT / path.partition("::")[0]).exists(), path


@pytest.mark.parametrize("name", [*PAGES, "CHANGELOG.md"])
def test_lines_of_prose_are_at_most_120_characters(name):
    for line in PAGES.get(name, (ROOT / "CHANGELOG.md").read_text()).splitlines():
        assert len(line) <= 120 or line.startswith("|"), line


def test_the_readme_shows_its_commands_and_their_result_on_one_screen():
    first = PAGES["README.md"].splitlines()[:40]
    assert {"make quickstart", "make test"} <= {line.split("#")[0].strip() for line in first}
    assert any("check passed" in line for line in first)


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES["README.md"]):
        assert (ROOT / link).exists(), link


@pytest.mark.feature("F15")
@pytest.mark.parametrize("name", ["README.md", "recipes.md"])
def test_the_recipe_shown_is_valid(name):
    block = PAGES[name][PAGES[name].index("    recipe:\n") :].split("\n\n")[0]
    recipe = parse_recipe(yaml.safe_load(block)["recipe"])
    assert recipe.schedule and len(recipe.overrides) == 2


def test_formats_and_options_of_the_table_exist():
    section = PAGES["recipes.md"].split("## Formats")[1]
    rows = [line.split("|") for line in section.splitlines() if re.match(r"\| `[a-z]", line)]
    named = {name: re.findall(r"\+(\w+)", row[4]) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert len(named) == 14
    for name, listed in named.items():
        parse(name)
        assert set(listed) <= set(options(name)), name


def test_the_python_shown_runs():
    code = PAGES["python.md"].split("## Modules\n\n")[1].split("\n\n- ")[0]
    names = {}
    exec(compile(textwrap.dedent(code), "python.md", "exec"), names)
    assert names["y"].isfinite().all() and str(names["layer"].mlp.fc1.quantizers.weight) == "nvfp4+2d"


@pytest.mark.feature("F15")
def test_what_is_experimental_is_called_so_in_the_docs_and_where_it_is_defined():
    section = PAGES["python.md"].split("## Experimental\n")[1]
    for thing in (QuantizerRole, CustomRecipe):
        assert f"hqsweep.quant.{thing.__name__}`" in section and "Experimental" in thing.__doc__
    import hqsweep.compat

    assert "`hqsweep.compat`" in section and "experimental" in hqsweep.compat.__doc__.lower()
