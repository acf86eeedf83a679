"""`hqsweep recipe`: list, show, diff, export, and one sentence for what is wrong."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

import hqsweep
from hqsweep.cli.main import app
from hqsweep.cli.recipe import _listed
from hqsweep.errors import UserError
from hqsweep.recipe import parse_recipe

pytestmark = pytest.mark.slow
MINE = """\
defaults: [mxfp8, _self_]
name: mine
overrides: [{layers: last(0.15), linear: bf16}]
schedule: [{at: 0.82, fprop: bf16}]
"""


def recipe(*words: str) -> Result:
    return CliRunner().invoke(app, ["recipe", *words])


class Listed(NamedTuple):
    """What `recipe ls` says, which reads every recipe: as rows, and in 80 columns beside two that are wrong."""

    rows: list[dict[str, Any]]
    beside_wrong: Result


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Listed:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("listed")
        write_folder(folder)
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")
        rows = json.loads(recipe("ls", "--json").stdout)
        (folder / "conf/recipe/bad.yaml").write_text("name: bad\nlinear: ${oc.env:HOME}\n")
        (folder / "conf/recipe/group.yaml").write_text("name: =cmd\nlinear: mxfp8\n")
        listed = Listed(rows, recipe("ls"))
    sys.modules.pop("my_factories", None)
    return listed


def write_folder(folder: Path) -> None:
    for name, text in {
        "conf/recipe/mine.yaml": MINE,
        "conf/sweep.yaml": "defaults: [convergence, {override recipe: mine}, _self_]\n",
        "alone.yaml": "name: alone\nlinear: {input: nvfp4|mxfp8, weight: mxfp8, grad_output: mxfp8}\n",
        "wrong.yaml": "name: wrong\nlinear: mxpf8\n",
        "other/recipe/moved.yaml": "# @package _global_\nlinear: mxfp8\n",
        "python.yaml": "name: python\n_target_: my_factories.mine\n",
        "my_factories.py": "def mine(role):\n    return 'nvfp4' if role.tensor_type == 'input' else 'mxfp8'\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    yield tmp_path
    sys.modules.pop("my_factories", None)


def test_ls_lists_packaged_and_own_recipes(listed: Listed):
    rows = {row["name"]: row for row in listed.rows}
    assert rows["nvfp4"]["weight"] == "nvfp4+2d" and rows["mine"]["input"] == "mxfp8"
    assert "nvfp4+rht+sr" in listed.beside_wrong.stdout


def test_ls_shows_what_tells_recipes_apart(listed: Listed):
    rows = {row["name"]: row for row in listed.rows}
    told = [json.dumps(row["parts"]) for row in rows.values() if row["same_as"] is None]
    assert len(set(told)) == len(told) and {row["same_as"] for row in rows.values()} == {None, "bf16"}
    assert rows["high_precision"]["same_as"] == "bf16" and rows["mxfp8"]["parts"] == {"linear": "mxfp8"}
    assert rows["fp32"]["parts"] == {"linear": "fp32", "head": "fp32"}
    experts = "input nvfp4+row_scaled|mxfp8, weight nvfp4|mxfp8, grad_output mxfp8"
    assert rows["nvfp4_row_scaled_fwd_mxfp8_bwd_original"]["parts"] == {"linear": "mxfp8", "grouped_linear": experts}
    assert rows["nvfp4_linear_fp8_dpa"]["parts"]["dpa"].startswith("qkv fp8_current, s fp8_delayed+most_recent")
    assert rows["mine"]["parts"] == {
        "linear": "mxfp8",
        "overrides layers last(0.15)": "linear bf16",
        "schedule after 82 % of the updates": "linear input bf16|mxfp8, weight bf16|mxfp8, grad_output mxfp8",
    }


def test_ls_breaks_no_word_at_any_width(listed: Listed):
    rows = listed.rows
    words = " ".join(w for row in rows for w in (row["name"], *row["parts"].values())).replace(",", " ").split()
    texts = {width: _listed(rows, width) for width in (200, 100, 80, 46, 30)}
    assert texts[80] in listed.beside_wrong.stdout
    for width, listed in texts.items():
        same = [w for row in rows if row["same_as"] for w in row["parts"].values()]
        assert set(words) - set(same) <= set(listed.replace(",", " ").replace(":", " ").split())
        assert max(map(len, listed.splitlines())) <= max(width, 56)  # of the longest word
        assert ("nvfp4  " in listed) == (width == 200), "beside the names where there is room"


def test_ls_lists_the_others_beside_wrong_ones(listed: Listed):
    said = listed.beside_wrong
    assert said.exit_code == 3
    assert "mine" in said.stdout and "nvfp4" in said.stdout
    assert "'bad'" in said.stderr and str(Path.home()) not in said.stderr
    assert "recipe.name: got '=cmd'; must match the pattern" in said.stderr


@pytest.mark.parametrize("name", ["mine", "conf/recipe/mine.yaml", "conf/sweep.yaml"])
def test_show_tells_every_slot_overrides_and_schedule(name: str):
    shown = json.loads(recipe("show", name, "--json").stdout)
    assert shown["recipe"]["overrides"][0]["layers"] == "last(0.15)"
    assert {row["slot"]: row["rowwise"] for row in shown["slots"]}["schedule[0].linear.input"] == "bf16"
    assert parse_recipe(shown["recipe"]) == parse_recipe(json.loads(recipe("export", name, "--to", "json").stdout))
    table = recipe("show", name, "--all").stdout
    for part in ("linear.weight", "gemm: exact", "overrides[0] is for layers last(0.15)", "after 82 % of the updates"):
        assert part in table


def test_slots_that_are_alike_are_one_line_unless_all_are_asked_for():
    short, whole = (recipe("show", "nvfp4_fwd_mxfp8_bwd_dequantized", *words).stdout for words in ((), ("--all",)))
    assert "input, weight of linear, grouped_linear" in short and "linear.weight" not in short
    assert short.count("\n") == 8 and whole.count("\n") == 19 and "wgrad" in whole
    short, whole = (recipe("diff", "nvfp4", "mxfp8", *words).stdout for words in ((), ("--all",)))
    assert "weight of linear, grouped_linear" in short and "grouped_linear.weight" in whole


def test_show_writes_a_recipe_by_its_products_where_it_can():
    text = "nvfp4*mxfp8/mxfp8/bf16"
    shown = json.loads(recipe("show", text, "--json").stdout)
    assert shown["gemms"] == {"linear": text, "head": text} and shown["slots"][0]["columnwise"] == "bf16"
    assert "\nlinear.gemms: mxfp8/mxfp8/mxfp8\n" in recipe("show", "mxfp8").stdout
    other = recipe("show", "nvfp4_fwd_mxfp8_bwd_dequantized")  # decoded rows are a source that products do not tell
    assert "gemms" not in other.stdout
    wrong = recipe("show", "format:mxfp4/nvfp5/mxfp8")
    assert wrong.exit_code == 2 and "recipe.linear.gemms: dgrad: format 'nvfp5'" in wrong.stderr


def test_show_of_a_factory_gives_its_name():
    shown = json.loads(recipe("show", "python.yaml", "--json").stdout)
    assert (shown["slots"], shown["recipe"]["qfactory"]) == ([], "my_factories.mine")
    assert "a Python factory, my_factories.mine" in recipe("show", "python.yaml").stdout
    assert "my_factories" not in sys.modules


def test_diff_names_what_differs():
    rows = json.loads(recipe("diff", "mxfp8", "alone.yaml", "--json").stdout)
    assert [row["slot"] for row in rows] == ["linear.input", "grouped_linear.input"]
    assert {key: rows[0][key] for key in ("field", "a", "b")} == {"field": "rowwise", "a": "mxfp8", "b": "nvfp4"}
    assert "input of linear, grouped_linear" in recipe("diff", "mxfp8", "alone.yaml").stdout
    equal = recipe("diff", "high_precision", "bf16")
    assert (equal.exit_code, equal.stdout) == (0, "high_precision and bf16 are equal\n")


def test_a_bare_format_and_a_yml_are_recipes_too(folder: Path):
    rows = json.loads(recipe("diff", "nvfp4", "format:nvfp4", "--json").stdout)
    assert {(row["slot"], row["a"], row["b"]) for row in rows} >= {
        ("linear.weight", "nvfp4+2d", "nvfp4"), ("head.input", "bf16", "nvfp4"),
    }  # fmt: skip
    (folder / "alone.yml").write_text((folder / "alone.yaml").read_text())
    assert recipe("diff", "alone.yaml", "alone.yml").stdout == "alone.yaml and alone.yml are equal\n"


def test_what_is_exported_as_json_is_what_python_takes(folder: Path):
    (folder / "conf/recipe/refers.yaml").write_text("linear: {input: nvfp4, weight: '${.input}', grad_output: mxfp8}\n")
    with pytest.raises(UserError, match=r"refers to other keys .*recipe export conf/recipe/refers.yaml --to json"):
        hqsweep.recipe("refers")
    assert recipe("export", "refers", "--to", "json", "--out", "whole.yaml").exit_code == 0
    assert str(hqsweep.recipe("whole.yaml").linear.weight) == "nvfp4"


def test_export_writes_a_module(folder: Path):
    printed = recipe("export", "nvfp4", "--to", "transformer-engine")
    assert printed.exit_code == 0 and printed.stdout.count("def qfactory(role):") == 1
    written = recipe("export", "nvfp4", "--to", "transformer-engine", "--out", "nvfp4.py")
    assert (written.stdout, Path("nvfp4.py").read_text()) == ("", printed.stdout)
    compile(printed.stdout, "nvfp4.py", "exec")
    assert "SCHEDULE = [(0, recipe), (0.82, recipe_1)]" in recipe(
        "export", "mine", "--to", "transformer-engine", "--layers", "12"
    ).stdout  # fmt: skip


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("show nvpf4", ["'nvpf4'", "did you mean 'nvfp4'?"]),
        ("show", ["NAME"]),
        ("show fp8_current", ["'fp8_current'", "did you mean 'format:fp8_current'?"]),
        ("show format:nvfp5", ["recipe.linear: format 'nvfp5'", "did you mean 'nvfp4'?"]),
        ("show lost.yml", ["'lost.yml'", "no such .yaml file"]),
        ("show lost.yaml", ["'lost.yaml'", "no such .yaml file"]),
        ("show some/where", ["'some/where'"]),
        ("show wrong.yaml", ["'wrong.yaml'", "recipe.linear", "mxpf8", "did you mean 'mxfp8'?"]),
        ("show other/recipe/moved.yaml", ["moved.yaml'", "no mapping as recipe", "@package"]),
        ("diff mxfp8", ["B"]),
        ("diff mxfp8 mxfp9", ["'mxfp9'", "did you mean 'mxfp8'?"]),
        ("export mxfp8", ["--to"]),
        ("export mxfp8 --to torchao", ["torchao", "transformer-engine"]),
        ("export mxfp4 --to transformer-engine", ["recipe.linear.input: TransformerEngine has no mxfp4"]),
        ("export mine --to transformer-engine", ["last(0.15)", "--layers N"]),
        ("export python.yaml --to transformer-engine", ["Python factory already, my_factories.mine"]),
        ("export mxfp8 --to json --out no/where.json", ["--out no/where.json", "folder that exists"]),
        ("shwo mxfp8", ["shwo"]),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(words: str, parts: list[str]):
    result = recipe(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("hqsweep: ") and result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


NAMES = ['"<img src=x>"', "'=cmd'", "../..", "''", "no", "1e3", "null", "[a]", "{a: 1}"]


@pytest.mark.parametrize("name", NAMES)
def test_the_names_that_run_refuses_are_refused_in_its_words(name: str, folder: Path):
    (folder / "named.yaml").write_text(f"name: {name}\nlinear: mxfp8\n")
    run = CliRunner().invoke(app, ["run", "conf=ci", "recipe=named.yaml", "--dry-run"])
    said = run.stderr.removeprefix("hqsweep: ").strip().removesuffix(" (in the run with seed=0)")
    assert run.exit_code == 2 and said.startswith("recipe.name: got ")
    result = recipe("show", "named.yaml")
    assert (result.exit_code, result.stderr) == (2, f"hqsweep: recipe 'named.yaml': {said}\n")


def test_every_command_of_recipes_refuses_such_a_name(folder: Path):
    (folder / "named.yaml").write_text("name: =cmd\nlinear: mxfp8\n")
    (folder / "conf/recipe/group.yaml").write_text("name: =cmd\nlinear: mxfp8\n")
    for words in (["diff", "mxfp8", "named.yaml"], ["export", "named.yaml", "--to", "json"], ["show", "group"]):
        result = recipe(*words)
        assert result.exit_code == 2
        assert "recipe.name: got '=cmd'; must match the pattern" in result.stderr


def test_a_file_without_a_name_has_that_of_the_file(folder: Path):
    (folder / "my recipe.yaml").write_text("linear: mxfp8\n")
    (folder / "my_recipe.yaml").write_text("linear: mxfp8\n")
    assert recipe("show", "my_recipe.yaml").exit_code == 0
    assert "recipe.name: got 'my recipe'; must match" in recipe("show", "my recipe.yaml").stderr
