"""Which runs enter: seeds that finished in every arm, trunks whose forks have ended, points that every trunk has."""

import math

import pandas as pd
import pytest

from hqsweep.report.compare.families import Rule, judge

NAN = math.nan
FORKS, WHOLE = Rule(design="fork", margin=0.25), Rule(design="whole run", margin=0.25)


def finals(rows):
    """Rows of curves.measures from (arm, seed, point, loss): a trunk for each seed, finished where there is a loss."""
    frame = pd.DataFrame(rows, columns=["arm", "seed", "point", "final_loss"])
    frame["train_loss"] = frame["final_loss"]
    frame["trunk"], frame["draw"] = "t" + frame["seed"].astype(str), frame["point"].map(str)
    frame["state"] = ["failed" if math.isnan(loss) else "finished" for loss in frame["final_loss"]]
    return frame.assign(diverged_at=NAN)


def study(points=(10, 20), trunks=range(4), missing=(), arms=("bf16", "a")):
    """Baseline at 2 nats, arms 1 % above it; (arm, seed, point) in `missing` have no loss."""
    return finals(
        [
            (arm, seed, point, NAN if (arm, seed, point) in missing else 2.0 if arm == "bf16" else 2.02 + 0.001 * seed)
            for arm in arms
            for seed in trunks
            for point in points
        ]
    )


def entered(family):
    points = family.points[family.points["arm"] == "a"]
    return sorted(set(points["trunk"])), sorted(set(points["point"]))


def test_without_holes_all_enter():
    family = judge(study(), "bf16", None, FORKS)
    assert entered(family) == (["t0", "t1", "t2", "t3"], [10, 20]) and family.left_out == () and family.loss == 2.0
    assert family.estimates["a"].gap == pytest.approx(100 * 0.0215 / 2) and family.estimates["a"].n == 4
    assert family.points["gap_pct"].mean() == pytest.approx(family.estimates["a"].gap)


def test_a_hole_takes_its_point_from_every_trunk_also_where_it_is_the_baselines():
    for arm in ("a", "bf16"):
        family = judge(study(missing=[(arm, 2, 20)]), "bf16", None, FORKS)
        assert entered(family) == (["t0", "t1", "t2", "t3"], [10])
        assert family.left_out == ("Point 20 is left out of every trunk, as a fork there has no result.",)


def test_a_trunk_without_any_fork_leaves_and_costs_no_point():
    family = judge(study(missing=[("a", 1, 10), ("a", 1, 20)]), "bf16", None, FORKS)
    assert entered(family) == (["t0", "t2", "t3"], [10, 20])
    assert family.left_out == ("Trunk t1 lacks forks and enters no gap.",)


def test_trunks_without_a_common_point_lose_the_last_one_with_the_fewest():
    family = judge(study(missing=[("a", 0, 10), ("a", 1, 20)], trunks=range(2)), "bf16", None, FORKS)
    assert entered(family) == (["t0"], [20])
    trunk, point = family.left_out
    assert trunk == "Trunk t1 lacks forks and enters no gap." and point.startswith("Point 10 is left out of every")


def test_forks_that_may_yet_finish_keep_their_trunk_out():
    rows = study(missing=[("a", 3, 20)])
    rows.loc[rows["final_loss"].isna(), "state"] = "pending"
    assert entered(judge(rows, "bf16", None, FORKS)) == (["t0", "t1", "t2"], [10, 20])
    alone = judge(rows[rows["seed"] == 3], "bf16", None, FORKS)
    assert entered(alone) == (["t3"], [10]) and alone.estimates["a"].verdict == "undecided"


def test_two_seeds_on_one_trunk_are_two_draws_of_one_replicate():
    rows = study(points=(10,), trunks=range(2)).assign(trunk="mine")
    rows["draw"] = [f"10 seed {seed}" for seed in rows["seed"]]
    family = judge(rows, "bf16", None, FORKS)
    assert family.estimates["a"].n == 1 and len(family.points) == 2
    low, high = family.these["a"]
    assert low < 100 * 0.0205 / 2 < high


def test_each_losing_arm_says_why():
    rows = study(points=(0,), trunks=range(3), arms=("bf16", "a", "lost", "late", "loud", "other"))
    rows.loc[rows["arm"].isin(["lost", "late"]), ["final_loss", "train_loss"]] = NAN
    rows.loc[rows["arm"] == "lost", "state"] = "failed"
    rows.loc[rows["arm"] == "late", "state"] = "running"
    rows.loc[(rows["arm"] == "loud") & (rows["seed"] == 1), "diverged_at"] = 640.0
    rows.loc[rows["arm"] == "other", "seed"] += 7
    rows["trunk"] = "seed " + rows["seed"].astype(str)
    family = judge(rows, "bf16", None, WHOLE)
    assert family.apart == {"lost": "failed", "late": "unfinished", "loud": "diverged", "other": "unpaired"}
    assert set(family.estimates) == {"a"} and family.estimates["a"].n == 3


def test_the_null_arm_is_a_control_of_whole_runs_and_none_of_forks():
    rows = study(arms=("bf16", "a", "null"), points=(0,))
    rows.loc[rows["arm"] == "null", ["final_loss", "train_loss"]] = [[2.0 + 0.01 * (-1) ** s] * 2 for s in range(4)]
    whole, forked = judge(rows, "bf16", "null", WHOLE), judge(rows, "bf16", "null", FORKS)
    gaps = whole.points[whole.points["arm"] == "a"]["gap"].tolist()
    assert gaps == pytest.approx([0.02 - 0.005, 0.021 + 0.005, 0.022 - 0.005, 0.023 + 0.005])
    assert forked.points[forked.points["arm"] == "a"]["gap"].tolist() == pytest.approx([0.02, 0.021, 0.022, 0.023])
    null = whole.points[whole.points["arm"] == "null"]["gap"].tolist()
    assert null == pytest.approx([0.01, -0.01, 0.01, -0.01])


def test_losses_correlate_over_seeds():
    rows = study(points=(0,), trunks=range(3))
    rows.loc[rows["arm"] == "bf16", ["final_loss", "train_loss"]] = [[2.0] * 2, [2.1] * 2, [2.2] * 2]
    assert judge(rows, "bf16", None, WHOLE).correlations == {"a": pytest.approx(1.0)}
    assert judge(rows[rows["seed"] < 2], "bf16", None, WHOLE).correlations == {}


def test_a_baseline_without_a_result_leaves_all_unpaired():
    family = judge(study(missing=[("bf16", s, p) for s in range(4) for p in (10, 20)]), "bf16", None, FORKS)
    assert family.apart == {"a": "unpaired"} and family.points.empty and math.isnan(family.loss)
