"""Texts of recipes are checked without torch, and say what the parsing of a recipe says."""

import itertools
import subprocess
import sys

import pytest
from cases import BASES, HIGH, first

from hqsweep.config.keys import check_pairs, check_texts
from hqsweep.errors import UserError
from hqsweep.formats import NAMES, parse, spellings
from hqsweep.formats.spec import FormatText, directions
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe import Recipe
from hqsweep.recipe.products import linear_module
from hqsweep.recipe.validate import validate

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
        "import sys\nfrom hqsweep.sweep.grid.run_words import read\nfrom hqsweep.errors import UserError\n"
        "for words in (['recipe.linear.input=mxfp9'], ['recipe=mxfp8', 'recipe.linear.input.rowwise=mxfp9']):\n"
        "    try:\n        read(['conf=quickstart', *words])\n"
        "    except UserError as error:\n        print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unknown name 'mxfp9'") == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_text_says_of_a_format_what_its_class_says(name):
    for text in spellings(name):
        said, format = FormatText.parse(text), parse(text)
        for field in ("scaling", "two_d", "rht", "rht_signed", "high_precision"):
            assert getattr(said, field) == getattr(format, field), (text, field)


@pytest.mark.parametrize("text", ["nvfp4+sr+rht", "nvfp4+tensor+rht+nosign", "mxfp8+2d", "nvfp4+2d|mxfp8@original"])
def test_both_directions_of_a_text_are_the_quantizers(text):
    quantizer = HybridQuantizer.parse(text)
    row, column, source = directions(text)
    assert (parse(row), parse(column), source) == (quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source)


QUANTIZERS = (*BASES, HIGH[-1], first(two_d=True), first(rht=16), "nvfp4|mxfp8", "mxfp4|bf16")


@pytest.mark.parametrize("gemm", ["exact", "strict"])
def test_a_pair_is_refused_as_the_modules_of_a_model_would(gemm):
    """Every input and weight, and a few gradients: whatever validate() refuses of a linear, and nothing else."""
    refused = 0
    for texts in itertools.product(QUANTIZERS, QUANTIZERS, ("bf16", "mxfp8", "nvfp4+rht")):
        recipe = {"linear": dict(zip(("input", "weight", "grad_output"), texts, strict=True)), "gemm": gemm}
        said, meant = refusal(check_pairs, recipe, ["linear"]), refusal(whole_model, recipe)
        assert said.replace("recipe.linear ", "recipe: x ", 1).replace("recipe.linear ", "x ") == meant, recipe
        refused += bool(said)
    assert 0 < refused < 3 * len(QUANTIZERS) ** 2


def refusal(check, *arguments) -> str:
    try:
        check(*arguments)
    except UserError as error:
        return str(error)
    return ""


def whole_model(recipe) -> None:
    validate(Recipe.from_config(recipe), 1, [linear_module("x", 512, 512, 512)])


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("head", {"input": "nvfp4"}),
        ("dpa", {"qkv": "mxfp8", "do": "mxfp8"}),
        ("grouped_linear", {"weight": "nvfp4"}),
    ],
)
def test_parts_have_their_own_products_and_defaults(part, text):
    recipe = {"linear": "mxfp8", part: text, "gemm": "strict"}
    with pytest.raises(UserError, match=f"^recipe.{part} .* cannot meet "):
        check_pairs(recipe, [part])
    check_pairs(recipe, ["linear"])


@pytest.mark.parametrize(
    "more",
    [
        {"overrides": [{"name": "*", "linear": "mxfp8"}]},
        {"schedule": [{"at": 0.5, "recipe": {}}]},
        {"qfactory": "a.b"},
        {"linear": {"input": "mxfp8"}},
        {"linear": {"input": "mxfp9", "weight": "nvfp4", "grad_output": "bf16"}},
        {"linear": 3},
    ],
)
def test_what_the_model_has_to_be_known_for_is_left_to_the_check_of_the_model(more):
    wrong = {"linear": {"input": "mxfp8", "weight": "nvfp4", "grad_output": "bf16"}, "gemm": "strict"}
    assert refusal(check_pairs, wrong, ["linear"])
    check_pairs(wrong | more, ["linear"])


def test_a_wrong_pair_is_told_without_torch():
    code = (
        "import sys\nfrom hqsweep.sweep.grid.run_words import read\nfrom hqsweep.errors import UserError\n"
        "for words in (['recipe=mxfp8', 'recipe.linear.weight=nvfp4'], ['recipe.linear=mxfp8|nvfp4']):\n"
        "    try:\n        read(['conf=convergence', 'recipe.gemm=strict', *words])\n"
        "    except UserError as error:\n        print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "recipe.linear fprop: input rowwise mxfp8 cannot meet weight rowwise nvfp4 under gemm=strict" in done.stdout
    assert "recipe.linear dgrad: grad_output rowwise mxfp8 cannot meet weight columnwise nvfp4" in done.stdout
