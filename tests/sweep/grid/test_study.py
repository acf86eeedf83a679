"""What a study adds to a grid: null arm, trunks, forks and baseline; and the keys that a growing study keeps."""

from pathlib import Path

import pytest

from hqsweep.config.study import parse_study
from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import SweepPlan, plan, work_order
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.grid.study import check_stated
from hqsweep.sweep.store.names import run_name
from hqsweep.sweep.store.run_dir import RunDir

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow

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


FORK = ["fork.at=100,200", "fork.steps=40", "fork.decay=30", "track=none"]


def planned(*words: str) -> SweepPlan:
    return plan(["conf=convergence", "recipe=bf16,mxfp8", *FORK, *words])


def names(sweep_plan: SweepPlan) -> list[str]:
    return [row["run"] for row in sweep_plan.rows()]


def parts(sweep_plan: SweepPlan) -> list[str]:
    """Names without the id."""
    return [name.rpartition("-")[0] for name in names(sweep_plan)]


def test_a_trunk_for_each_seed_and_a_fork_for_each_arm_seed_and_point() -> None:
    assert parts(planned("seed=0,1", "null_arm=true")) == [
        "trunk-s0", "trunk-s1",
        "bf16-s0-at100", "bf16-s0-at200", "bf16-s1-at100", "bf16-s1-at200",
        "mxfp8-s0-at100", "mxfp8-s0-at200", "mxfp8-s1-at100", "mxfp8-s1-at200",
        "null-s0-at100", "null-s0-at200", "null-s1-at100", "null-s1-at200",
    ]  # fmt: skip


def test_runs_start_trunk_by_trunk_and_point_by_point_the_baseline_and_the_null_arm_first() -> None:
    sweep_plan = plan(["conf=convergence", "recipe=mxfp8,bf16", *FORK, "seed=0,1", "null_arm=true"])
    runs = [RunDir(Path(name)) for name in names(sweep_plan)]
    ordered = [run.name.rpartition("-")[0] for run in work_order(sweep_plan, runs)]
    assert ordered[:7] == [
        "trunk-s0", "bf16-s0-at100", "null-s0-at100", "mxfp8-s0-at100", "bf16-s0-at200", "null-s0-at200",
        "mxfp8-s0-at200",
    ]  # fmt: skip
    assert ordered[7:] == [name.replace("-s0", "-s1") for name in ordered[:7]]
    whole = plan(["conf=convergence", "recipe=mxfp8,bf16", "seed=0,1"])
    runs = [RunDir(Path(name)) for name in names(whole)]
    assert work_order(whole, runs) == runs


def test_a_trunk_is_in_the_recipe_of_the_baseline_and_a_fork_knows_it_and_its_own_end() -> None:
    sweep_plan = planned("baseline=mxfp8")
    trunk, *forks = sweep_plan.configs
    assert trunk.recipe.name == "mxfp8" and trunk.fork.at == [100, 200] and trunk.train.steps == 200
    assert trunk.stats.every == 0 and not trunk.start
    fork = forks[1]
    assert (fork.fork.at, fork.train.steps, fork.start, fork.own_steps) == ([200], 270, 200, 70)
    assert {each.fork.trunk for each in forks} == {names(sweep_plan)[0]}
    assert {row["trunk"] for row in sweep_plan.rows()} == {None, names(sweep_plan)[0]}
    assert [point.arm for point in sweep_plan.points] == ["trunk", "bf16", "bf16", "mxfp8", "mxfp8"]


def test_the_null_arm_is_the_baseline_with_noise_at_the_fork() -> None:
    bf16, null = (c for c in planned("null_arm=true").configs if c.start == 100 and c.recipe.name in ("bf16", "null"))
    assert null.fork.noise == 0.01 and bf16.fork.noise == 0 == null.model.init_noise
    assert null.recipe.linear == bf16.recipe.linear and null.fork.trunk == bf16.fork.trunk


@pytest.mark.parametrize("word", ["fork.at=[200,100]", "fork.at=range(100,300,100)", "fork.at=200,100"])
def test_points_are_written_as_a_list_or_as_values(word: str) -> None:
    assert names(plan(["conf=convergence", "recipe=bf16,mxfp8", word, *FORK[1:]])) == names(planned())
    assert parts(plan(["conf=convergence", "recipe=bf16", "fork.at=100", *FORK[1:]])) == ["trunk-s0", "bf16-s0-at100"]


def test_other_keys_that_are_swept_have_trunks_of_their_own_unless_they_change_no_number_of_it() -> None:
    sweep_plan = planned("train.lr=1e-3,2e-3")
    assert [p.arm for p in sweep_plan.points if p.trunk is None] == ["trunk_lr-0.001", "trunk_lr-0.002"]
    assert len({c.fork.trunk for c in sweep_plan.configs if c.start}) == 2
    assert len([c for c in planned("train.log_every=5,10").configs if c.fork.is_trunk]) == 1


def test_other_points_arms_and_lengths_keep_the_name_of_the_trunk() -> None:
    trunk, *forks = names(planned())
    for word in ("fork.at=100,150", "fork.steps=50", "stats.every=7", "train.steps=230", "train.eval_every=30"):
        words = [w for w in FORK if not w.startswith(word.partition("=")[0])]
        assert names(plan(["conf=convergence", "recipe=bf16,mxfp8", word, *words]))[0] == trunk, word
    assert set(forks) < set(
        names(plan(["conf=convergence", "recipe=bf16,mxfp8,nvfp4", "fork.at=50,100,200", *FORK[1:]]))
    )
    for word in ("fork.warmup=5", "seed=1", "train.lr=7e-4", "model.dim=256"):
        assert names(planned(word))[0] != trunk, word


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fork.at=300"], r"fork.at: step 300 is beyond the trunk, which has 200 steps \(train.steps\)"),
        (["fork.at=10", "train.steps=abc"], "train.steps: got 'abc'; must be an integer"),
        (["fork.at=10", "train.steps=null"], "train.steps: got None; must be an integer"),
        (["fork.at=100,100"], "fork.at: step 100 is given twice"),
        (["fork.at=[]"], "fork.at: empty; give the steps"),
        (["fork.at=0"], "fork.at.0: got 0; must be greater than or equal to 1"),
        (["fork.at=x"], "fork.at: got 'x'; must be a list"),
        (["fork.at=10", "fork.decay=0"], "fork.decay: got 0; must be greater than or equal to 1"),
        (["fork.at=10", "fork.steps=0"], "fork.steps: got 0; must be greater than or equal to 1"),
        (["fork.at=10", "fork.steps=10,20"], "fork.steps cannot be swept, it belongs to the whole sweep"),
        (["fork.at=10", "fork.noise=1"], "fork.noise: no such key"),
        (["fork.at=10", "train.decay=0.2"], "train.decay: is not read in a fork study"),
        (["fork.at=10", "train.warmup=0.2"], "train.warmup: is not read in a fork study"),
        (["fork.at=10", "stats.capture_at=3"], "stats.capture_at: a fork study has no one step for it"),
        (
            ["fork.at=10", "recipe.schedule=[{at: 0.5, linear: bf16}]"],
            "bf16 is the baseline, in whose recipe the trunks",
        ),
        (["fork.at=10", "recipe=bf16,high_precision"], "arms 'bf16' and 'high_precision' differ in the name alone"),
        (["recipe=bf16,high_precision"], "arms 'bf16' and 'high_precision' differ in the name alone"),
        (["fork.at=10", "fork.trunk=nowhere"], "fork.trunk: 'nowhere' has no checkpoint; give a file step_N.pt"),
    ],
)
def test_what_is_refused(words: list[str], says: str) -> None:
    recipe = [] if any(word.startswith("recipe=") for word in words) else ["recipe=bf16,mxfp8"]
    with pytest.raises(UserError, match=says):
        plan(["conf=convergence", "track=none", *recipe, *words])


def test_a_schedule_counts_the_steps_of_the_fork(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for name, at in (("soon", 69), ("late", 70)):
        schedule = f"schedule: [{{at: {at}, linear: bf16}}]"
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"name: {name}\nlinear: mxfp8\n{schedule}\n")
    words = ["conf=convergence", *FORK]
    assert len(plan([*words, "recipe=bf16,soon"], config_dir=tmp_path).points) == 5
    with pytest.raises(UserError, match="70 is after 70 of 70 updates"):
        plan([*words, "recipe=bf16,late"], config_dir=tmp_path)


def test_runs_of_whole_length_keep_their_ids() -> None:
    config = plan(["conf=convergence", "recipe=bf16", "track=none"]).points[0].config
    assert config["fork"] is None
    assert run_name(config) == run_name({key: value for key, value in config.items() if key != "fork"})


DECIDED = {"seeds": {"until": "decided", "max": 8}, "baseline": "bf16"}


@pytest.fixture
def begun(store, planned):
    """A sweep with these keys, of which one run has begun."""

    def begin(state: str = "running", **keys):
        study = parse_study(keys).model_dump(mode="json")
        run, _ = store.create(sweep="s", conf="c", overrides=[], runs=[planned(), planned(seed=1)], study=study)
        run.write_status(state=state)
        return store

    return begin


CHANGES = [
    ({"seeds": {"until": "decided", "max": 16}}, "seeds.max: 16, but 's' began to run with seeds.max=8, and"),
    ({"seeds": {"until": "fixed", "max": 8}}, "seeds.until: fixed, but 's' began to run with seeds.until=decided"),
    ({"margin": 1}, "margin: 1.0, but 's' began to run with margin=0.25"),
    ({"baseline": "fp32"}, "baseline: fp32, but 's' began to run with baseline=bf16"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_statement_after_the_first_run_is_refused(begun, change, message):
    store = begun(**DECIDED)
    check_stated(store, "s", parse_study(DECIDED))
    with pytest.raises(UserError, match=message):
        check_stated(store, "s", parse_study(DECIDED | change))
    check_stated(store, "another", parse_study(DECIDED | change))


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_before_the_first_run_anything_may_change(begun, change, message):
    check_stated(begun("pending", **DECIDED), "s", parse_study(DECIDED | change))


def test_a_study_of_fixed_size_that_was_seen_cannot_grow(begun):
    store = begun(margin=1)
    check_stated(store, "s", parse_study({"margin": 2}))
    with pytest.raises(UserError, match=r"seeds.until: decided, but 's' began to run with seeds.until=fixed"):
        check_stated(store, "s", parse_study({"margin": 1, "seeds": {"until": "decided"}}))
