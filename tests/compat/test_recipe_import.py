"""Factories for TransformerEngine become recipes: exported ones come back, and others are refused in a sentence."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import hqsweep
from hqsweep.cli.main import app
from hqsweep.compat.export import to_transformer_engine
from hqsweep.compat.recipe_import import from_transformer_engine
from hqsweep.errors import UserError
from hqsweep.recipe import Recipe

NAMES = ["nvfp4", "mxfp8", "current_scaling", "float8_block_scaling", "nvfp4_4over6", "mxfp8_fwd_nvfp4_bwd"]
HEADER = """
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, NVFP4BlockScaling
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "factories.py"
    path.write_text(HEADER + text)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_comes_back(name, tmp_path):
    recipe = hqsweep.recipe(name)
    path = tmp_path / "exported.py"
    path.write_text(to_transformer_engine(recipe, name))
    for own in ("qfactory", "recipe"):
        config = from_transformer_engine(path, own)
        back = Recipe.from_config(config)
        assert (back.linear, back.grouped_linear, back.head) == (recipe.linear, recipe.grouped_linear, recipe.head)
    assert "transformer_engine" not in sys.modules


def test_a_recipe_and_a_factory_of_names_are_read(tmp_path):
    path = written(tmp_path, """
def mine(role):
    if role is not None and role.tensor_type == "weight":
        return te.HybridQuantizer(
            rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=MXFP8Quantizer(te.DType.kFloat8E4M3)
        )
    return MXFP8Quantizer(te.DType.kFloat8E4M3)

built_in = NVFP4BlockScaling()
attention = CustomRecipe(te.nvfp4_linear_fp8_dpa_factory, fp8_dpa=True)
""")  # fmt: skip
    linear = {"input": "mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}
    assert from_transformer_engine(path, "mine") == {"linear": linear, "grouped_linear": linear, "head": linear}
    assert from_transformer_engine(path, "built_in")["linear"]["grad_output"] == "nvfp4+rht+sr"
    assert from_transformer_engine(path, "attention")["dpa"] == {
        "qkv": "fp8_current", "s": "fp8_delayed+most_recent+history1", "do": "fp8_current+e5m2",
        "dp": "fp8_delayed+e5m2+most_recent+history1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("def f(role): return 'nvfp4' if 'fc1' in role.name else 'mxfp8'", "f", "tells modules apart by their names"),
        ("def f(role): raise KeyError('lost')", "f", r"f\(.*raised KeyError: 'lost'"),
        ("def f(role): return 3", "f", "returned 3; it must return"),
        ("def factory(role): return 'mxfp8'", "factroy", "there is no 'factroy'.*'factory'"),
        ("f = 3", "f", "f is a int; it must be a factory or a recipe"),
        ("1 / 0", "f", "factories.py raised ZeroDivisionError: division by zero"),
        ("from transformer_engine.pytorch import NVFP4Quantiser", "f", "cannot import name 'NVFP4Quantiser'"),
        ("class Own(MXFP8Quantizer):\n    def quantize_impl(self, x): return x\n"
         "def f(role): return Own(te.DType.kFloat8E4M3)", "f", "linear.input quantizes by a method of its own"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_in_a_sentence(text, name, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        from_transformer_engine(written(tmp_path, text), name)


def test_the_command_prints_and_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "def mine(role): return MXFP8Quantizer(te.DType.kFloat8E4M3)\n")
    run = lambda *words: CliRunner().invoke(app, ["recipe", "import", *words])  # noqa: E731
    printed = run("factories.py:mine")
    assert printed.exit_code == 0 and yaml.safe_load(printed.stdout)["linear"]["weight"] == "mxfp8"
    assert json.loads(run("factories.py:mine", "--json").stdout)["name"] == "mine"
    assert run("factories.py:mine", "--out", "own.yaml").exit_code == 0
    assert str(hqsweep.recipe("own.yaml").linear.weight) == "mxfp8"
    for words, sentence in (
        (["factories.py"], "names no factory; give FILE.py:NAME"),
        (["lost.py:mine"], "No such file or directory"),
        (["factories.py:mine", "--out", "own.txt"], "must end in .yaml or .yml"),
        (["factories.py:mine", "--out", "no/own.yaml"], "give a file in a folder that exists"),
    ):
        result = run(*words)
        assert (result.exit_code, result.stdout) == (2, "") and sentence in result.stderr
