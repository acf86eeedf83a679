"""What arms are called, from what differs; and that a run is found again whatever its arm was called."""

import re
from pathlib import Path

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import plan
from hqsweep.sweep.grid.arms import LONGEST, Difference, labels
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.store.names import id_in, run_name
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

SLOTS = ("input", "weight", "grad_output")
GRID = ["conf=convergence", "recipe=mxfp8", "recipe.linear.input=mxfp8,nvfp4|mxfp8", "track=none"]


def arms(*differences: Difference) -> list[str]:
    return [label.arm for label in labels(differences).values()]


def slots(**formats: str) -> Difference:
    return Difference(name="bf16", fields=tuple((f"recipe.linear.{slot}", text) for slot, text in formats.items()))


def test_a_grid_of_slots_has_the_recipe_itself_and_what_differs_from_it() -> None:
    words = ["recipe=mxfp8", "recipe.linear.input=mxfp8,nvfp4", "recipe.linear.grad_output=mxfp8,mxfp8+e5m2"]
    assert [point.arm for point in expand("convergence", words).points] == [
        "mxfp8", "mxfp8_grad_output-mxfp8+e5m2", "mxfp8_input-nvfp4", "mxfp8_input-nvfp4_grad_output-mxfp8+e5m2",
    ]  # fmt: skip


def test_all_labels_of_a_grid_take_a_shorter_form_where_one_is_long() -> None:
    pair = "nvfp4|mxfp8@rowwise_dequantized"
    assert arms(slots(input=pair)) == ["bf16_input-nvfp4-mxfp8-dequantized"]
    assert arms(slots(input=pair), slots(input="mxfp8", grad_output="nvfp4|mxfp8+e5m2")) == [
        "bf16_input-nvfp4-mxfp8-dq", "bf16_input-mxfp8_grad-nvfp4-mxfp8+e5m2",
    ]  # fmt: skip
    assert arms(slots(**dict.fromkeys(SLOTS, pair)), slots(input="mxfp8")) == [
        "bf16_xw-nvfp4-mxfp8-dq_dy-nvfp4-mxfp8-dq", "bf16_x-mxfp8",
    ]  # fmt: skip


def test_pairs_has_short_names_of_its_own() -> None:
    names = {point.arm for point in expand("pairs").points}
    assert len(names) == 18 and {"bf16", "bf16_xw-nvfp4-mxfp8-dq_dy-mxfp8"} < names
    assert max(map(len, names)) <= LONGEST and not any(re.search(r"[^A-Za-z0-9._+-]", arm) for arm in names)


def test_what_is_too_long_or_would_be_the_same_gets_a_hash() -> None:
    paths = [Difference(name="a", settings=(("data.path", f"{'x' * 60}/{end}"),)) for end in "ab"]
    long = arms(*paths)
    assert len(set(long)) == 2 and max(map(len, long)) <= LONGEST
    same = [Difference(name="a", settings=(("data.path", text),)) for text in ("x/y", "x y")]
    assert len(set(arms(*same))) == 2 and all(arm.startswith("a_path-x-y_") for arm in arms(*same))
    assert arms(Difference(name="n" * 60)) == ["n" * 60]


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ((("train.lr", "0.002"),), "a_lr-0.002"),
        ((("train.lr", "-1"), ("model.tied", "true")), "a_lr--1_tied-true"),
        ((("model.dim", "8"), ("data.dim", "9")), "a_model.dim-8_data.dim-9"),
        ((("data.path", "'/a b/c.txt'"),), "a_path--a-b-c.txt"),
        ((("data.path", ""),), "a_path-none"),
    ],
)
def test_a_setting_is_named_by_the_last_part_of_its_key(keys: tuple[tuple[str, str], ...], label: str) -> None:
    assert arms(Difference(name="a", settings=keys)) == [label]


def test_folder_and_arm_are_called_the_same_and_the_id_is_as_before(tmp_path: Path) -> None:
    sweep_plan = plan([*GRID, f"runs_dir={tmp_path}"])
    names = [row["run"] for row in sweep_plan.rows()]
    assert [name.rpartition("-s0-")[0] for name in names] == ["mxfp8", "mxfp8_input-nvfp4-mxfp8"]
    assert [id_in(name) for name in names] == [id_in(run_name(point.config)) for point in sweep_plan.points]


def test_a_run_is_found_again_whatever_its_arm_was_called(tmp_path: Path) -> None:
    store, sweep_plan = RunStore(tmp_path), plan([*GRID, f"runs_dir={tmp_path}"])
    for name in store.names("s", sweep_plan.points):
        assert not (tmp_path / "s" / name).exists()
    before = [run_name(point.config) for point in sweep_plan.points]  # as earlier versions called them
    for name in before:
        (tmp_path / "s" / name).mkdir(parents=True)
    asked = {"sweep": "s", "conf": "c", "overrides": [], "runs": sweep_plan.points}
    assert [run.name for run in store.create(**asked)] == before == store.names("s", sweep_plan.points)
    (_, run) = store.runs("s")
    assert run.manifest()["arm"] == "mxfp8_input-nvfp4-mxfp8"
    run.update_manifest(arm="mxfp8 input=nvfp4|mxfp8")
    run.write_status(state="finished")
    more = plan([*GRID, "seed=0,1", f"runs_dir={tmp_path}"])
    store.create(**asked | {"runs": more.points})
    assert {run.manifest()["arm"] for run in store.runs("s")} == {"mxfp8", "mxfp8 input=nvfp4|mxfp8"}


NAMED = """
defaults: [convergence, _self_]
arms:
  plain: {recipe: mxfp8}
  input: {recipe: mxfp8, recipe.linear.input: nvfp4|mxfp8}
  narrow: {recipe: mxfp8, model: {dim: 64, heads: 2}}
  slow: [recipe=mxfp8, train.lr=5e-4]
hydra: {sweeper: {params: {recipe: "bf16,nvfp4", seed: "range(2)"}}}
"""


@pytest.fixture
def named(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(NAMED)
    return str(tmp_path / "mine.yaml")


def test_a_sweep_names_its_arms_which_win_over_its_recipes(named: str) -> None:
    points = expand(named).points
    assert [(p.arm, p.config["seed"]) for p in points] == [
        (arm, seed) for arm in ("plain", "input", "narrow", "slow") for seed in (0, 1)
    ]
    assert {p.config["recipe"]["name"] for p in points} == {"mxfp8"} and not any("arms" in p.config for p in points)
    assert points[2].config["recipe"]["linear"]["input"] == "nvfp4|mxfp8"
    assert points[4].config["model"]["dim"] == 64 and points[6].config["train"]["lr"] == 5e-4
    assert points[7].changed == ("recipe=mxfp8", "train.lr=0.0005", "seed=1")
    (again,) = expand(named, points[7].overrides).points
    assert again.config == points[7].config


def test_named_arms_meet_other_swept_keys_and_the_null_arm(named: str) -> None:
    words = ["arms={a:{recipe:bf16},b:{recipe:mxfp8}}", "seed=0", "null_arm=true", "train.steps=10,20"]
    assert [p.arm for p in expand(named, words).points] == [
        "a_steps-10", "a_steps-20", "b_steps-10", "b_steps-20", "null_steps-10", "null_steps-20",
    ]  # fmt: skip
    words = ["arms={a:{},b:{train.lr:2e-3}}", "recipe=bf16,mxfp8", "seed=0"]
    arms = ["a_recipe-bf16", "a_recipe-mxfp8", "b_recipe-bf16", "b_recipe-mxfp8"]
    assert [p.arm for p in expand(named, words).points] == arms
    assert [p.arm for p in expand(named, ["arms=null", "seed=0"]).points] == ["bf16", "nvfp4"]


def test_forks_of_named_arms_share_their_trunk(named: str) -> None:
    words = ["fork.at=100", "seed=0"]
    sweep_plan = plan([f"conf={named}", *words, "arms={a:{recipe:bf16},b:{recipe:mxfp8}}"])
    assert [row["run"].rpartition("-")[0] for row in sweep_plan.rows()] == ["trunk-s0", "a-s0-at100", "b-s0-at100"]
    with pytest.raises(UserError, match=r"arms.narrow: it changes what its trunk is trained with"):
        expand(named, words)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("recipe=bf16", "arm 'plain' says recipe=mxfp8; leave one of them out"),
        ("arms={}", "arms: empty; name one at least"),
        ("arms=3", "arms: got 3"),
        ("arms={trunk:{}}", "arms: 'trunk' cannot be the name of an arm"),
        ("arms={null:{}}", "arms.None"),
        ("arms={a:{seed:1}}", "arms.a: 'seed=1': seed cannot differ between arms"),
        ("arms={a:{margin:1}}", "margin cannot differ between arms"),
        ("arms={a:['train.lr=1,2']}", "arms.a: 'train.lr=1,2' has several values"),
        ("arms={a:[recipe]}", "arms.a: override 'recipe': not of the form KEY=VALUE"),
        ("arms={a:{recipe:mxfp9}}", "arms.a: override 'recipe=mxfp9': no recipe 'mxfp9'"),
        ("arms={a:{},b:{}}", "arms 'a_recipe-bf16' and 'b_recipe-bf16' differ in the name alone"),
    ],
)
def test_what_no_arm_can_be(word: str, says: str, named: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        plan([f"conf={named}", word])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipe=mxfp8,bf16"], "bf16 (it is not quantized)"),
        (["recipe=mxfp8,nvfp4"], "mxfp8 (the first of the grid; baseline=ARM takes another)"),
        (["recipe=mxfp8,nvfp4", "baseline=nvfp4"], "nvfp4 (named by the key baseline)"),
        (["recipe=mxfp8", "recipe.linear.input=bf16,mxfp8"], "mxfp8 (the one arm in which nothing is changed)"),
        (["recipe=bf16", "recipe.linear.input=mxfp8,bf16"], "bf16 (it is not quantized)"),
        (["arms={mine:{recipe:mxfp8},baseline:{recipe:nvfp4}}"], "baseline (its name says so)"),
        (["arms={mine:{recipe.linear.input:mxfp8},none:{recipe:bf16}}"], "none (it is not quantized)"),
        (["recipe=mxfp8", "seed=0,1"], None),
    ],
)
def test_the_baseline_is_said_and_why(words: list[str], line: str | None) -> None:
    assert plan(["conf=convergence", *words]).baseline_line == (line and f"baseline: {line}")
