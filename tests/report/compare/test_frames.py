"""Run folders come back as the frames that the report promises, whatever state they are in."""

import json
import math

import pytest

from hqsweep.errors import UserError
from hqsweep.report.compare.frames import common_end, flatten, load
from hqsweep.sweep.store.run_dir import RunDir


def test_rows_of_every_run_come_back_with_their_arm_and_seed(make_sweep, fake):
    frames = load(make_sweep(fake.three_arms()))
    assert len(frames.runs) == 9 and list(frames.runs["arm"].unique()) == ["bf16", "mxfp8", "nvfp4"]
    assert (
        frames.runs["config.train.lr"].eq(0.001).all() and frames.runs["manifest.versions.torch"].eq("2.13.0+cpu").all()
    )
    losses = frames.metrics[frames.metrics["metric"] == "train_loss"]
    assert (losses.groupby(["arm", "seed"])["step"].max() == fake.steps).all() and len(losses) == 9 * fake.steps
    assert set(frames.stats["direction"]) == {"rowwise", "columnwise", "output"}
    assert frames.stats["underflow_pct"].isna().equals(frames.stats["direction"] == "output")


def test_a_torn_tail_and_nan_are_read_and_nan_means_diverged(make_sweep, fake):
    good, bad = make_sweep(
        [fake.Run(arm="a"), fake.Run(arm="b", nan_from=150, state="failed", reason="loss is nan at step 150")]
    )
    with good.jsonl("metrics").open("a") as file:
        file.write('{"step": 201, "metric": "train_')
    fake.seal_again(good)
    frames = load([good, bad])
    assert frames.runs.set_index("arm")["diverged"].to_dict() == {"a": False, "b": True}
    tail = frames.metrics[(frames.metrics["arm"] == "b") & (frames.metrics["metric"] == "train_loss")]["value"]
    assert tail[:149].map(math.isfinite).all() and tail[149:].isna().all()


def test_a_run_that_never_started_is_there(make_sweep, fake):
    (run,) = make_sweep([fake.Run()])
    fake.take_back(run)
    frames = load([run])
    assert frames.runs["state"].tolist() == ["pending"] and frames.metrics.empty and frames.stats.empty


def test_the_same_run_in_two_sweeps_counts_once_and_the_finished_one_wins(make_sweep, fake):
    (first,) = make_sweep([fake.Run(state="interrupted")], "one")
    (second,) = make_sweep([fake.Run()], "two")
    run_id = first.manifest()["run_id"]
    second.update_manifest(run_id=run_id)
    fake.seal_again(second)
    assert load([first, second]).runs["state"].tolist() == ["finished"]
    assert load([second, first]).runs["state"].tolist() == ["finished"]


def test_an_unfinished_run_with_the_config_of_another_is_left_out(make_sweep, fake):
    """No seal says that it is its own; two runs of one arm and seed would have no unique pairs."""
    runs = make_sweep([fake.Run(arm="bf16"), fake.Run(arm="nvfp4", state="running"), fake.Run(arm="nvfp4", seed=1)])
    other = next(run for run in runs if run.name.startswith("nvfp4-s1"))
    running = next(run for run in runs if run.name.startswith("nvfp4-s0"))
    running.config_path.write_bytes(other.config_path.read_bytes())
    frames = load(runs)
    assert [entry.run for entry in frames.left_out] == [f"{running.sweep}/{running.name}"]
    assert "the config of another run" in frames.left_out[0].fault
    assert len(frames.runs) == 2


@pytest.mark.parametrize(("rate", "stated"), [(0.002, "0.002"), (None, "null")])
def test_arms_that_differ_only_in_config_get_the_difference_in_their_label(make_sweep, fake, rate, stated):
    old = make_sweep([fake.Run(arm=arm, seed=seed) for arm in ("bf16", "nvfp4") for seed in (0, 1)], "sweep")
    new = make_sweep([fake.Run(arm=arm, seed=seed, gap=0.1) for arm in ("bf16", "nvfp4") for seed in (0, 1)], "again")
    for run in new:
        config = run.config()
        config["train"]["lr"] = rate
        run.config_path.write_text(json.dumps(config))
        fake.seal_again(run)
    arms = load([*old, *new]).runs.groupby("arm")["seed"].apply(list).to_dict()
    assert arms == {f"{arm} train.lr={lr}": [0, 1] for arm in ("bf16", "nvfp4") for lr in ("0.001", stated)}


def test_flatten_names_leaves_by_their_path():
    assert flatten({"a": {"b": 1, "c": [1, {"d": 2}]}, "e": None}, "x") == {
        "x.a.b": 1,
        "x.a.c": '[1, {"d": 2}]',
        "x.e": None,
    }


def test_nothing_to_read_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no run to read"):
        load([])
    with pytest.raises(UserError, match=r"no config\.yaml"):
        load([RunDir(tmp_path)])


def test_another_job_is_named(make_sweep, fake):
    (run,) = make_sweep([fake.Run()])
    run.config_path.write_text(json.dumps({"job": "parity", "seed": 0}))
    fake.seal_again(run)
    with pytest.raises(UserError, match=r"no convergence run among them \(came: 1 parity\)"):
        load([run]).of_job("convergence")


def test_designs_replicates_points_and_draws(make_sweep, fake):
    runs = load(make_sweep([*fake.fork_study({}, trunks=1), fake.Run(seed=7)])).runs
    columns = ["design", "trunk", "point", "draw", "seed"]
    trunk = runs["run"][0].split("/")[1]
    assert runs[columns].to_numpy().tolist() == [
        ["trunk", trunk, 0, "0", 0],
        ["fork", "trunk-s0", 40, "40", 0],
        ["fork", "trunk-s0", 80, "80", 0],
        ["whole run", "seed 7", 0, "0", 7],
    ]


def test_draws_name_the_seed_where_one_trunk_is_forked_with_several(make_sweep, fake):
    runs = [fake.Run(seed=seed, trunk="mine", point=40) for seed in (0, 1)] + [fake.Run(trunk="else", point=40)]
    assert load(make_sweep(runs)).runs["draw"].tolist() == ["40 seed 0", "40 seed 1", "40"]


def test_where_a_fork_leaves_its_trunk_makes_no_other_arm(make_sweep, fake):
    """Points, trunks and the steps that follow from them differ in one sweep; another decay does make other arms."""
    runs = make_sweep(fake.fork_study({"mxfp8": 0.001}, trunks=2), "sweep")
    assert set(load(runs).runs["arm"]) == {"trunk", "bf16", "mxfp8"}
    again = make_sweep(fake.fork_study({"mxfp8": 0.002}, trunks=2), "again")
    for run in again:
        config = run.config()
        config["fork"]["decay"] = 40
        run.config_path.write_text(json.dumps(config))
        fake.seal_again(run)
    assert {"bf16 fork.decay=20", "mxfp8 fork.decay=40"} <= set(load([*runs, *again]).runs["arm"])


def test_forks_of_one_seed_at_other_points_are_one_arm_and_another_recipe_marks_its_arm_alone(make_sweep, fake):
    runs = fake.fork_study({"mxfp8": 0.01}, trunks=1)
    assert set(load(make_sweep(runs)).runs["arm"]) == {"trunk", "bf16", "mxfp8"}
    changed = [fake.Run(**vars(run) | {"fmt": "mxfp4"}) for run in runs if run.arm == "mxfp8"]
    arms = set(load(make_sweep([*runs, *changed], "again")).runs["arm"])
    assert {"trunk", "bf16"} < arms and {arm.partition(" ")[0] for arm in arms - {"trunk", "bf16"}} == {"mxfp8"}


def test_forks_end_together_at_one_step_with_one_decay(make_sweep, fake):
    runs = make_sweep(fake.fork_study({"a": 0.01}, trunks=1, end=120))
    assert common_end(load(runs).runs) == 120
    assert common_end(load(make_sweep(fake.fork_study({"a": 0.01}, trunks=1), "apart")).runs) is None
    other = load(runs).runs
    other.loc[other["point"] == 80, "config.fork.decay"] = 10
    other.loc[other["point"] == 80, "config.fork.steps"] = 30
    assert common_end(other) is None, "forks of two decays are not of one schedule"
