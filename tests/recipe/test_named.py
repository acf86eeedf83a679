"""What a text means as a recipe: a name, a path, a format; and hqsweep.recipe(text)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import NAMES, PACKAGED

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.recipe import Recipe, parse_recipe
from hqsweep.recipe.argument import first_stage, meaning
from hqsweep.sweep.grid.compose import load_recipe

MINE = "defaults: [mxfp8, _self_]\nname: mine\nhead: fp32\n"
SCHEDULED = "name: later\nlinear: nvfp4\nschedule: [{at: 0.8, fprop: bf16}, {at: 0.9, linear: bf16}]\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/recipe").mkdir(parents=True)
    for name, text in {
        "conf/recipe/mine.yaml": MINE,
        "later.yaml": SCHEDULED,
        "wrong.yaml": "linear: mxpf8\n",
        "python.yaml": "_target_: my.factory\n",
        "unknown.yml": "lnear: mxfp8\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def in_all_slots(text: str) -> Recipe:
    return Recipe.from_config({"linear": text, "head": text})


@pytest.mark.parametrize("name", PACKAGED)
def test_a_name_is_the_packaged_recipe(name: str):
    file = Path(__file__).parents[2] / f"conf/recipe/{name}.yaml"
    assert hq.recipe(name) == hq.recipe(file) == hq.recipe(f" {name} ")
    assert hq.recipe(name) is hq.recipe(name), "it is read once"


def test_an_own_recipe_comes_before_a_packaged_one_and_is_read_anew(folder: Path):
    assert str(hq.recipe("mine").head.input) == "fp32" and str(hq.recipe("mine").linear.input) == "mxfp8"
    packaged = hq.recipe("nvfp4")
    own = folder / "conf/recipe/nvfp4.yaml"
    for text in ("mxfp4", "fp8_block"):
        own.write_text(f"name: nvfp4\nlinear: {text}\n")
        assert str(hq.recipe("nvfp4").linear.input) == text
    own.unlink()
    assert hq.recipe("nvfp4") is packaged


@pytest.mark.parametrize(
    "text", ["nvfp4|mxfp8", "fp8_current", "nvfp4+sr", "nvfp4|nvfp4", "nvfp4|mxfp8@rowwise_dequantized"]
)
def test_a_text_that_is_no_name_is_a_quantizer_in_all_slots(text: str):
    assert hq.recipe(text) == hq.recipe(f"format:{text}") == hq.recipe(f"format: {text} ") == in_all_slots(text)


@pytest.mark.parametrize("text", NAMES)
def test_format_says_the_bare_format(text: str):
    assert hq.recipe(f"format:{text}") == in_all_slots(text)
    assert parse_recipe(load_recipe(f"format:{text}")) == in_all_slots(text), "the command line means the same"


@pytest.mark.parametrize("path", ["later.yaml", "./later.yaml", Path("later.yaml"), "{folder}/later.yaml", "json"])
def test_a_path_is_the_recipe_of_its_file(path: str, folder: Path):
    if path == "json":  # as `hqsweep recipe export --to json` writes it; a separator tells it from a name
        path = "./later.json"
        Path(path).write_text(json.dumps({"linear": "nvfp4", "schedule": hq.recipe("later.yaml") and [
            {"at": 0.8, "fprop": "bf16"}, {"at": 0.9, "linear": "bf16"}]}))  # fmt: skip
    recipe = hq.recipe(path if isinstance(path, Path) else path.format(folder=folder))
    assert [change.at for change in recipe.schedule] == [0.8, 0.9] and recipe.linear == in_all_slots("nvfp4").linear


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp5", r"hqsweep.recipe: 'nvfp5' is no recipe and no format \(did you mean 'nvfp4'\?\)"),
        ("float8_blok_scaling", "did you mean 'float8_block_scaling'"),
        ("fp8_curent", "did you mean 'fp8_current'"),
        ("mime", "did you mean 'mine'"),
        ("format:nvfp5", "hqsweep.recipe: format 'nvfp5': unknown name 'nvfp5' .did you mean 'nvfp4'"),
        ("format:float8_block_scaling", "format 'float8_block_scaling': unknown name"),
        ("format:", "format ''"),
        ("", "format ''"),
        ("nvfp4+srr", r"unknown option '\+srr' \(did you mean 'sr'"),
        ("nvfp4|mxfp9", "unknown name 'mxfp9'"),
        ("nvfp4|mxfp8@dequantized", "columnwise_source is 'dequantized'"),
        ("lost.yaml", "recipe 'lost.yaml': no such file"),
        ("conf/recipe/mine", r"recipe 'conf/recipe/mine': no such file \(did you mean 'mine.yaml'"),
        ("conf/recipe/", "recipe 'conf/recipe': is a folder"),
        (Path("conf"), "recipe 'conf': is a folder"),
        ("wrong.yaml", "recipe 'wrong.yaml': recipe.linear: format 'mxpf8'.*did you mean 'mxfp8'"),
        ("unknown.yml", "unknown key 'lnear'.*did you mean 'linear'"),
        (3, "got 3; it takes the name of a recipe"),
        (None, "got None"),
    ],
)
def test_what_is_none_of_these_is_one_sentence(text: object, message: str):
    with pytest.raises(UserError, match=message) as caught:
        hq.recipe(text)
    assert "\n" not in str(caught.value)


def test_a_factory_stays_a_name():
    assert hq.recipe("python.yaml").is_name


def test_who_follows_no_schedule_says_so():
    with pytest.warns(
        UserWarning, match=r"convert: recipe 'later.yaml' has a schedule \(after 80 % of the updates, after 90"
    ):
        assert first_stage("later.yaml", "convert") == hq.recipe("later.yaml")
    assert first_stage("format:nvfp4", "convert") == meaning("format:nvfp4", "convert")


def test_the_package_is_a_function_without_an_import_of_hydra():
    code = (
        "import sys, hqsweep as hq; first = hq.recipe; import hqsweep.recipe; from hqsweep import recipe\n"
        "assert first is hqsweep.recipe is recipe and 'recipe' in dir(hq) and 'torch' not in sys.modules\n"
        "hq.recipe('nvfp4'); print([m for m in ('hydra', 'omegaconf', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
