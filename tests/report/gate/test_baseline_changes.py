"""Why curves differ: the recipe, by slot and direction; the config; the machine most like this one; or nothing."""

import pytest

from hqsweep.recipe.listing import described
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.report.gate.baseline_changes import broken, difference, equal, recipe_changes


def recipe(linear, **keys):
    return described(parse_recipe({"name": "x", "linear": linear} | keys))


def entry(curve="a", run_id="1", **machine):
    return {"curve_sha256": curve, "run_id": run_id, "fingerprint": {"threads": "2", "isa": "avx2"} | machine}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (recipe("mxfp8"), recipe("mxfp8"), ""),
        (
            recipe("mxfp8"),
            recipe("mxfp4"),
            "linear.input, linear.weight, linear.grad_output rowwise and columnwise mxfp8 -> mxfp4",
        ),
        (
            recipe("mxfp8"),
            recipe({"input": "mxfp8", "weight": "mxfp8|mxfp4", "grad_output": "mxfp8"}),
            "linear.weight columnwise mxfp8 -> mxfp4",
        ),
        (
            recipe("nvfp4|mxfp8", gemm="exact"),
            recipe("nvfp4|mxfp8@rowwise_dequantized", gemm="exact", head="mxfp8"),
            "linear.input, linear.weight, linear.grad_output columnwise_source original -> rowwise_dequantized; "
            "head.input, head.weight, head.grad_output rowwise and columnwise bf16 -> mxfp8",
        ),
        (
            recipe("mxfp8"),
            recipe("mxfp8", grouped_linear={"input": "mxfp8", "weight": "mxfp4|mxfp8", "grad_output": "mxfp8"}),
            "grouped_linear.weight rowwise mxfp8 -> mxfp4",
        ),
        (
            recipe("mxfp8"),
            recipe("mxfp8", gemm="native", overrides=[{"name": "layers.0.*", "linear": "bf16"}]),
            "overrides[0].linear.input, overrides[0].linear.weight, overrides[0].linear.grad_output rowwise and "
            "columnwise none -> bf16; gemm exact -> native; overrides[0] none -> 'layers.0.*'",
        ),
    ],
)  # fmt: skip
def test_a_change_of_a_recipe_is_named_by_slot_and_direction(old, new, says):
    assert recipe_changes(old, new) == says


def test_a_run_may_equal_any_draw_and_must_equal_one_of_its_own_machine():
    new, draws = entry("b"), [entry("a", threads="1"), entry("b", threads="1")]
    assert equal(new, draws) and not broken(new, draws)
    assert not equal(entry("c"), draws) and not broken(entry("c"), draws)
    assert broken(entry("c"), [*draws, entry("d")])
    assert not broken(entry("c", run_id="2"), [entry("d")])


def test_the_difference_is_that_to_the_draw_whose_machine_is_most_like_this_one():
    far, near = entry("a", threads="1", isa="avx512"), entry("b", threads="4")
    assert difference([(entry("c"), [far, near])]) == "curves differ, and so does threads 4 -> 2"
    assert difference([(entry("c"), [far, entry("b")])]) == "curves differ on an equal machine and config"
    assert difference([(entry("b"), [far, near])]) == "bitwise equal"


def test_another_config_is_named_by_its_recipe_where_that_changed():
    pairs = [(entry("c", run_id="2"), [entry("a")])]
    assert difference(pairs) == "curves differ, and so does the config"
    assert difference(pairs, "gemm exact -> native") == "curves differ, and so does the recipe: gemm exact -> native"
