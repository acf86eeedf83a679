"""The key factorial: factors, the arms of their design, and what is refused."""

import pytest

from hqsweep.config.factorial import FactorialStudy
from hqsweep.config.study import parse_study
from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand

SIX = [f"{tensor}.{way}" for tensor in ("input", "weight", "grad_output") for way in ("rowwise", "columnwise")]


def test_conf_factorial_has_every_arm_of_its_design_and_one_baseline():
    grid = expand("factorial")
    arms = {point.arm: point.config["recipe"]["linear"] for point in grid.points}
    assert len(arms) == 32 + 2 and grid.study.baseline == "baseline" and arms["trunk"] == arms["baseline"]
    assert grid.study.factorial.design.resolution == 6
    texts = {direction for slot in arms["baseline"].values() for direction in (slot["rowwise"], slot["columnwise"])}
    assert texts == {"bf16"}
    name = "xrow-wrow-dyrow-wcol-xcol-dycol"
    assert {value["rowwise"] for value in arms[name].values()} == {"nvfp4"} and len(name) <= 44


def test_an_arm_is_made_again_by_its_own_overrides():
    point = next(p for p in expand("factorial").points if p.arm == "xrow-wrow")
    again = expand("factorial", [*point.overrides, "null_arm=false", "fork=null"]).points
    assert len(again) == 1 and again[0].config["recipe"] == point.config["recipe"]


def test_keys_of_the_design_are_overridden_one_by_one():
    points = expand(
        "factorial", ["factorial.resolution=4", "factorial.high=mxfp4", "null_arm=false", "fork=null"]
    ).points
    assert len({point.arm for point in points}) == 16
    formats = {slot["rowwise"] for point in points for slot in point.config["recipe"]["linear"].values()}
    assert formats == {"bf16", "mxfp4"}


def test_any_key_with_two_values_is_a_factor():
    study = FactorialStudy(
        factors=["input.rowwise", {"recipe.linear.input.columnwise_source": ["original", "rowwise_dequantized"]},
                 {"train.lr": [1e-3, 2e-3]}], resolution="full",
    )  # fmt: skip
    assert study.names == ["xrow", "xsrc", "lr"] and len(study.arms) == 8
    assert study.arms["xrow-lr"] == {
        "recipe.linear.input.rowwise": "nvfp4", "recipe.linear.input.columnwise_source": "original", "train.lr": 2e-3
    }  # fmt: skip
    assert study.label((0, 1)) == "input.rowwise x input.columnwise_source"
    assert FactorialStudy(factors=[{"a.lr": [1, 2]}, {"b.lr": [1, 2]}]).names == ["lr0", "lr1"]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"factors": ["input.row", "weight.rowwise"]}, "did you mean 'input.rowwise'"),
        ({"factors": ["input.rowwise"]}, "1 factors; give 2 to 12"),
        ({"factors": ["input.rowwise", "input.rowwise"]}, "recipe.linear.input.rowwise is given twice"),
        ({"factors": ["input.rowwise", {"train.lr": [1]}]}, "LOW, HIGH"),
        ({"factors": SIX, "high": "bf16"}, "one value at both levels"),
        ({"factors": SIX, "resolution": 7}, "must be 3, 4, 5 or 'full'"),
    ],
)
def test_other_designs_are_refused(stated, said):
    with pytest.raises(UserError, match=said):
        parse_study({"factorial": stated})


def test_a_design_and_named_arms_are_not_given_together():
    with pytest.raises(UserError, match="leave one of them out"):
        parse_study({"factorial": {"factors": SIX}, "arms": {"a": ["recipe=mxfp8"]}})
