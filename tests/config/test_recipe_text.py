"""Texts of recipes are checked without torch, and say what the parsing of a recipe says."""

import subprocess
import sys

import pytest

from hqsweep.config.recipe_text import check_texts
from hqsweep.errors import UserError
from hqsweep.recipe import Recipe

WRONG = [
    ("recipe.linear.input", "mxfp9"),
    ("recipe.linear.input", "mxfp8+sr"),
    ("recipe.linear.weight", "nvfp4|mxfp8@rowise_dequantized"),
    ("recipe.dpa.qkv", "mxfp8|fp8_block+eps"),
    ("recipe.norm", "fp33"),
    ("recipe.head.weight.columnwise", "mxfp8+2d+2d"),
    ("recipe.linear.grad_output.columnwise_source", "rowwise"),
]


@pytest.mark.parametrize(("key", "text"), WRONG)
def test_a_wrong_text_is_named(key, text):
    with pytest.raises(UserError, match=rf"^{key}: "):
        check_texts(key, text)


def test_the_message_is_that_of_the_recipe_itself():
    linear = {"input": "mxfp9", "weight": "mxfp8+sr", "grad_output": "mxfp8"}
    with pytest.raises(UserError) as early:
        check_texts("recipe", {"linear": linear})
    with pytest.raises(UserError) as late:
        Recipe.from_config({"linear": linear})
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "value", [None, 3, [], {"name": "x", "gemm": "exact", "linear": "nvfp4|mxfp8", "overrides": []}]
)
def test_what_is_right_or_no_quantizer_passes(value):
    check_texts("recipe", value)
    check_texts("train.steps", value)


def test_nothing_of_it_imports_torch():
    code = (
        "import sys\nfrom hqsweep.sweep.words import read\nfrom hqsweep.errors import UserError\n"
        "for words in (['recipe.linear.input=mxfp9'], ['recipe=mxfp8', 'recipe.linear.input.rowwise=mxfp9']):\n"
        "    try:\n        read(['conf=quickstart', *words])\n"
        "    except UserError as error:\n        print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unknown name 'mxfp9'") == 2
