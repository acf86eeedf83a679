"""F/D/W, a section by its products: the section that it gives, the way back, and refusals."""

import pytest

import hqsweep
from hqsweep.errors import UserError
from hqsweep.nn import Linear
from hqsweep.recipe import LinearQuantizers, parse_recipe
from hqsweep.recipe.gemms import gemms_text, section_texts
from hqsweep.recipe.listing import by_gemms
from hqsweep.recipe.pairs import GEMMS

MIXED = "mxfp4/nvfp4+sr/mxfp8"
EACH = "nvfp4*mxfp8/mxfp4*mxfp6_e2m3/fp8_current*bf16"


def test_every_operand_has_the_format_of_its_product():
    section = LinearQuantizers.parse({"gemms": EACH}, "m")
    formats = {g: [str(getattr(getattr(section, t), d)) for t, d in operands] for g, operands in GEMMS.items()}
    assert formats == {
        "fprop": ["nvfp4", "mxfp8"], "dgrad": ["mxfp4", "mxfp6_e2m3"], "wgrad": ["fp8_current", "bf16"]
    }  # fmt: skip
    # TransformerEngine: weight.row = input.row = F, weight.col = grad.row = D, input.col = grad.col = W
    assert section_texts(MIXED) == {
        "input": "mxfp4|mxfp8", "weight": "mxfp4|nvfp4+sr", "grad_output": "nvfp4+sr|mxfp8"
    }  # fmt: skip
    with_transform = section_texts("nvfp4/nvfp4+rht/bf16")["grad_output"]
    assert with_transform == "nvfp4+rht|bf16"  # literal: it is of one operand, so +rht is also rowwise


@pytest.mark.parametrize("text", [MIXED, EACH, "bf16/bf16/bf16", "nvfp4+2d*nvfp4/mxfp8/nvfp4+rht"])
def test_the_text_of_a_section_is_the_text_it_came_from(text):
    assert gemms_text(LinearQuantizers.parse({"gemms": text}, "m").texts()) == text


def test_a_section_with_another_source_has_no_text():
    assert by_gemms(hqsweep.recipe("quartet2_like")) == {}
    assert by_gemms(hqsweep.recipe("nvfp4")) == {
        "linear": "nvfp4*nvfp4+2d/nvfp4+sr*nvfp4+2d/nvfp4+rht+sr*nvfp4+rht"
    }  # fmt: skip


def test_parts_that_differ_have_texts_of_their_own():
    recipe = parse_recipe({
        "linear": {"gemms": MIXED}, "head": {"gemms": "mxfp8/mxfp8/bf16"},
        "grouped_linear": {"gemms": "mxfp8/mxfp8/mxfp8"},
        "overrides": [{"name": "layers.0.*", "linear": {"gemms": EACH}}],
        "schedule": [{"at": 0.5, "linear": {"gemms": "bf16/bf16/bf16"}}, {"at": 0.8, "linear": {"input": "mxfp8"}}],
    })  # fmt: skip
    told = by_gemms(recipe)
    assert told == {
        "linear": MIXED, "grouped_linear": "mxfp8/mxfp8/mxfp8", "head": "mxfp8/mxfp8/bf16", "overrides[0].linear": EACH,
        **{f"schedule[{i}].{part}": text for i, linear in enumerate(("bf16/bf16/bf16", "mxfp8*bf16/bf16/bf16*mxfp8"))
           for part, text in (("linear", linear), ("grouped_linear", "mxfp8/mxfp8/mxfp8"),
                              ("head", "mxfp8/mxfp8/bf16"), ("overrides[0].linear", EACH))},
    }  # fmt: skip


def test_python_takes_it_wherever_it_takes_a_recipe():
    whole = hqsweep.recipe(MIXED)
    assert whole == hqsweep.recipe(f"format:{MIXED}")
    assert str(whole.linear.weight) == str(whole.head.weight) == "mxfp4|nvfp4+sr"
    for argument in (MIXED, {"gemms": MIXED}, {"linear": {"gemms": MIXED}}):
        layer = Linear(32, 32, name="m", recipe=argument)
        assert layer.quantizers == whole.linear


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"gemms": MIXED, "input": "mxfp8"}, "m: gemms says the formats of input, .*; leave out gemms, or input"),
        ({"gemms": "mxfp4/nvfp4"}, "m.gemms: got 'mxfp4/nvfp4'; it takes F/D/W, a format for each of fprop, dgrad"),
        ({"gemms": "a*b*c/mxfp8/mxfp8"}, "it takes F/D/W"),
        ({"gemms": 3}, "got 3; it takes F/D/W"),
        ({"gemms": "mxfp4/nvfp5/mxfp8+x"}, r"m.gemms: dgrad: .*did you mean 'nvfp4'.*; wgrad: .* unknown option '\+x'"),
        ({"gemms": "mxfp4//mxfp8"}, "dgrad: format '': unknown name ''"),
        ({"gem": MIXED}, r"unknown key 'gem'.*it takes input, weight, grad_output"),
    ],
)  # fmt: skip
def test_what_is_refused(section, message):
    with pytest.raises(UserError, match=message):
        LinearQuantizers.parse(section, "m")


def test_only_linears_have_these_products():
    with pytest.raises(UserError, match=r"recipe\.dpa: unknown key 'gemms'; it takes qkv, s, do, dp"):
        parse_recipe({"linear": "mxfp8", "dpa": {"gemms": MIXED}})
    with pytest.raises(UserError, match="no such file"):
        hqsweep.recipe("some/folder/recipe")


def test_a_projected_weight_has_no_text_by_products():
    section = {"input": "mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}
    assert gemms_text(section) == "mxfp8/mxfp8/mxfp8"
    assert gemms_text(section | {"weight": "project(mxfp4) > mxfp8"}) is None
