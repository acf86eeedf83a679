"""null_arm=true adds one arm named null: the baseline's runs with model.init_noise=0.01."""

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import plan
from hqsweep.sweep.grid.compose import expand

ARMS = ["bf16", "mxfp8", "null"]


def test_one_more_arm_that_differs_from_the_baseline_in_the_noise_alone() -> None:
    points = expand("stdlib", ["recipe=mxfp8,bf16", "seed=0,1", "null_arm=true"]).points
    assert sorted({p.arm for p in points}) == ARMS
    (null,) = (p for p in points if (p.arm, p.config["seed"]) == ("null", 1))
    (bf16,) = (p for p in points if (p.arm, p.config["seed"]) == ("bf16", 1))
    assert null.config["model"] == bf16.config["model"] | {"init_noise": 0.01}
    assert null.config["recipe"] == bf16.config["recipe"] | {"name": "null"}
    apart = ("model", "recipe")
    assert {k: v for k, v in null.config.items() if k not in apart} == {
        k: v for k, v in bf16.config.items() if k not in apart
    }
    assert null.changed == ("seed=1", "model.init_noise=0.01")


def test_its_overrides_lead_to_its_config() -> None:
    *_, null = expand("stdlib", ["recipe=bf16", "seed=3", "null_arm=true"]).points
    (again,) = expand("stdlib", null.overrides).points
    assert again.config == null.config


def test_without_bf16_the_first_recipe_is_the_baseline() -> None:
    *_, null = expand("convergence", ["recipe=fp32,mxfp8", "null_arm=true"]).points
    assert null.config["recipe"]["linear"]["input"] == "fp32" and null.arm == "null"


def test_each_value_of_another_swept_key_gets_its_own() -> None:
    points = expand("convergence", ["recipe=bf16,mxfp8", "train.lr=1e-3,2e-3", "null_arm=true"]).points
    assert [p.arm for p in points[4:]] == ["null_lr-0.001", "null_lr-0.002"]


def test_there_is_none_unless_asked_for_and_no_run_config_has_the_switch() -> None:
    points = expand("convergence").points
    assert "null" not in {p.arm for p in points} and not any("null_arm" in p.config for p in points)
    assert len(plan(["conf=convergence", "recipe=bf16,mxfp8", "null_arm=true"]).configs) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["null_arm=maybe"], "null_arm: got 'maybe'; must be true or false"),
        (["null_arm=true,false"], "null_arm cannot be swept"),
        (["null_arm=true", "recipe=3"], "no recipe '3'"),
    ],
)
def test_what_it_refuses(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        expand("convergence", words)


def test_a_defaults_list_with_off_in_it_is_one_sentence(tmp_path) -> None:
    path = tmp_path / "off.yaml"
    path.write_text("defaults: [convergence, {override stats: off}]\n")
    with pytest.raises(UserError, match=r"conf=off: .*bool"):
        expand(str(path))


def test_a_config_with_a_wrong_recipe_is_left_to_the_typed_config(tmp_path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("job: convergence\nnull_arm: true\nrecipe: 3\nseed: 0\n")
    with pytest.raises(UserError, match="recipe"):
        plan([f"conf={path}"])
