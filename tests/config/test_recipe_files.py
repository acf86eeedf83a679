"""Recipes of names and files, read without Hydra: what it would compose, or a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import PACKAGED

from hqsweep.config import recipe_files
from hqsweep.config.recipe_files import known_names, packaged_names, read_recipe, recipe_file
from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import Composer, load_recipe

FILES = {
    "conf/recipe/nvfp4.yaml": "name: own\nlinear: mxfp4\n",
    "conf/recipe/mine.yaml": "defaults: [mxfp8_e5m2_grad, _self_]\nname: mine\nlinear: {weight: nvfp4}\nhead: fp32\n",
    "conf/recipe/base_last.yaml": "defaults: [_self_, mxfp8]\nname: mine\nhead: fp32\nlinear: {weight: nvfp4}\n",
    "conf/recipe/no_self.yaml": "defaults: [mine, fp32]\noverrides: [{name: a, linear: bf16}]\nlinear: {input: bf16}\n",
    "conf/recipe/no-letters.1.yaml": "linear: mxfp8\nschedule: [{at: 0.5, fprop: bf16}]\n",
    "conf/recipe/_hidden.yaml": "linear: mxfp8\n",
    "other/recipe/near.yaml": "defaults: [beside]\nname: near\n",
    "other/recipe/beside.yaml": "linear: mxfp4+floor\n",
    "alone.yaml": "name: alone\nlinear: {input: nvfp4|mxfp8, weight: mxfp8, grad_output: mxfp8}\n",
    "whole.yaml": "job: convergence\nrecipe: {name: inner, linear: mxfp8+e5m2}\n",
}  # fmt: skip
FAULTY = {
    "conf/recipe/twice.yaml": ("defaults: [round, _self_]\nlinear: mxfp8\n", "leads back to twice.yaml"),
    "conf/recipe/round.yaml": ("defaults: [twice]\n", "leads back to round.yaml"),
    "conf/recipe/lost.yaml": ("defaults: [mxpf8]\n", r"names 'mxpf8', which is no recipe \(did you mean 'mxfp8'\?\)"),
    "conf/recipe/refers.yaml": ("linear: {input: mxfp8, weight: '${.input}'}\n", r"refers to other keys .* export"),
    "conf/recipe/moved.yaml": ("defaults: [{/train: default}]\nlinear: mxfp8\n", "list of other .* export"),
    "sweep.yaml": ("defaults: [convergence]\nrecipe: {linear: mxfp8}\n", "a defaults list of other configs"),
    "list.yaml": ("- mxfp8\n", "its YAML is no mapping; write name and linear"),
    "text.yaml": ("recipe: mxfp8\n", "its YAML gives no mapping as recipe"),
    "empty.yaml": ("", "its YAML is no mapping"),
    "bad.yaml": ("linear: [mxfp8\n", r"bad.yaml: line 2: .*; correct the YAML"),
    "key.yaml": ("linear: mxfp8\nlinear: nvfp4\n", "bad|twice|'linear'"),
    "pipe.yaml": (None, "is no file"),
    "folder.yaml/x": ("", None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {**FILES, **{name: text for name, (text, _) in FAULTY.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            os.mkfifo(path)
        else:
            path.write_text(text)
    return tmp_path


@pytest.mark.slow
def test_a_packaged_recipe_is_what_hydra_composes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder / "other")
    composer = Composer("convergence", [])
    for name in PACKAGED:
        assert recipe_file(name).parent == recipe_files.PACKAGED / "recipe"
        assert read_recipe(recipe_file(name)) == composer.compose([f"recipe={name}"])["recipe"], name


@pytest.mark.parametrize("name", ["nvfp4", "mine", "base_last", "no_self", "no-letters.1"])
def test_an_own_recipe_is_what_hydra_composes_and_comes_first(name: str):
    path = recipe_file(name)
    assert path == Path("conf/recipe") / f"{name}.yaml"
    assert read_recipe(path) == load_recipe(name) == load_recipe(str(path))


@pytest.mark.parametrize("path", ["other/recipe/near.yaml", "alone.yaml", "whole.yaml"])
def test_a_file_is_what_hydra_composes(path: str):
    assert read_recipe(Path(path)) == load_recipe(path)
    again = Path(path).with_suffix(".yml")  # which Hydra does not read
    again.write_text(Path(path).read_text())
    assert read_recipe(again) == load_recipe(str(again)) == load_recipe(path)


def test_names_are_those_of_the_command_line():
    own = {"nvfp4", "mine", "base_last", "no_self", "no-letters.1"}
    assert packaged_names() == PACKAGED and set(known_names()) >= {*PACKAGED, *own} and "_hidden" not in known_names()
    assert [recipe_file(name) for name in ("_hidden", "fp8_current", "nvfp4+sr", "", "a" * 300, "\0", "..")] == [
        None
    ] * 7


@pytest.mark.parametrize("name", [name for name, (_, message) in FAULTY.items() if message])
def test_what_gives_no_recipe_is_one_sentence(name: str):
    with pytest.raises(UserError, match=FAULTY[name][1]) as caught:
        read_recipe(Path(name))
    assert "\n" not in str(caught.value)


def test_a_path_that_leads_to_no_file_is_one_sentence(folder: Path):
    for path, message in (
        ("alon.yaml", r"no such file \(did you mean 'alone.yaml'\?\)"),
        ("no/where.yaml", "no such file"),
        ("folder.yaml", "is a folder; give the YAML file"),
        ("a" * 300 + ".yaml", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            read_recipe(Path(path))


def test_reading_a_name_imports_neither_torch_nor_hydra():
    code = (
        "import sys; from hqsweep.config.recipe_files import *; read_recipe(recipe_file('high_precision'));"
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
