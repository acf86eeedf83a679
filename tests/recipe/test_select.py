"""Layer selectors: indices from both ends, first and last, and what is not one."""

import pytest

from hqsweep.errors import UserError
from hqsweep.recipe import QuantizerRole
from hqsweep.recipe.sectioned import Layers, layers_of


@pytest.mark.parametrize(
    ("value", "count", "chosen"),
    [
        (0, 4, {0}),
        (-1, 4, {3}),
        ([0, -1, -2], 4, {0, 2, 3}),
        (7, 4, set()),
        (-5, 4, set()),
        ("first(2)", 4, {0, 1}),
        ("first(9)", 4, {0, 1, 2, 3}),
        ("last(1)", 4, {3}),
        ("last(9)", 4, {0, 1, 2, 3}),
        ("last(0.15)", 12, {10, 11}),  # 1.8, rounded up
        ("last(0.15)", 20, {17, 18, 19}),  # 3 exactly
        ("last(0.15)", 2, {1}),
        ("first(0.5)", 3, {0, 1}),
        (" last( 0.1 )", 30, {27, 28, 29}),  # 0.1 * 30 is 3, which binary fractions miss
    ],
)
def test_choice(value, count, chosen):
    layers = Layers.parse(value, "w")
    assert layers.of(range(count)) == chosen
    assert Layers.parse(layers.to_config(), "w") == layers


def test_layers_need_not_start_at_zero_or_be_contiguous():
    assert Layers.parse("last(1)", "w").of([3, 5, 8]) == {8} and Layers.parse([-1, 5], "w").of([3, 5, 8]) == {5, 8}


def test_relative_choices_depend_on_the_model():
    assert [Layers.parse(v, "w").relative for v in (3, [-1], "first(1)")] == [False, True, True]


def test_spellings_of_one_choice_are_equal():
    assert Layers.parse(3, "w") == Layers.parse([3, 3], "w") and Layers.parse("last(.5)", "w") == Layers.parse(
        "last(0.50)", "w"
    )


@pytest.mark.parametrize(
    "value", ["last", "last(0)", "last(1.5)", "last(1.2.3)", "middle(2)", [], ["0"], True, 1.5, {}]
)
def test_what_is_no_choice_says_what_is(value):
    with pytest.raises(UserError, match=r"^w: got .*; it takes an index.*first\(N\) or last\(N\)"):
        Layers.parse(value, "w")


def test_the_layer_is_the_first_number_of_a_name():
    names = ["layers.3.attn.qkv", "decoder.layers.11.mlp.experts.2.fc1", "head", "tl1.fc2", "0.fc"]
    assert [QuantizerRole("linear", "input", n).layer for n in names] == [3, 11, None, None, 0]
    assert layers_of([QuantizerRole("linear", "input", n) for n in names]) == [0, 3, 11]
