"""Which runs enter: seeds that finished in every arm; of each arm trunks whose forks have ended, at common points."""

import math
from dataclasses import replace

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
    assert (
        entered(family) == (["t0", "t1", "t2", "t3"], [10, 20])
        and family.left_out == ()
        and family.losses == {"bf16": 2.0, "a": 2.0}
    )
    assert family.estimates["a"].gap == pytest.approx(100 * 0.0215 / 2) and family.estimates["a"].n == 4
    assert family.points["gap_pct"].mean() == pytest.approx(family.estimates["a"].gap)


def test_a_hole_takes_its_point_from_every_trunk_also_where_it_is_the_baselines():
    for arm in ("a", "bf16"):
        family = judge(study(missing=[(arm, 2, 20)]), "bf16", None, FORKS)
        assert entered(family) == (["t0", "t1", "t2", "t3"], [10])
        assert family.left_out == ("a: the point 20 lacks forks.",)


def test_a_trunk_without_any_fork_leaves_and_costs_no_point():
    family = judge(study(missing=[("a", 1, 10), ("a", 1, 20)]), "bf16", None, FORKS)
    assert entered(family) == (["t0", "t2", "t3"], [10, 20])
    assert family.left_out == ("a: 3 of 4 trunks (without t1).",)


def test_trunks_without_a_common_point_lose_the_last_one_with_the_fewest():
    family = judge(study(missing=[("a", 0, 10), ("a", 1, 20)], trunks=range(2)), "bf16", None, FORKS)
    assert entered(family) == (["t0"], [20])
    assert family.left_out == ("a: 1 of 2 trunks (without t1); the point 10 lacks forks.",)


def test_forks_that_may_yet_finish_keep_their_trunk_out():
    rows = study(missing=[("a", 3, 20)])
    rows.loc[rows["final_loss"].isna(), "state"] = "pending"
    assert entered(judge(rows, "bf16", None, FORKS)) == (["t0", "t1", "t2"], [10, 20])
    alone = judge(rows[rows["seed"] == 3], "bf16", None, FORKS)
    assert entered(alone) == (["t3"], [10]) and alone.estimates["a"].verdict == "undecided"


def unfinished(rows, *arms, but=()):
    """The rows with those of `arms` pending, but for (seed, point) in `but`."""
    waits = rows["arm"].isin(arms) & ~pd.Series([pair in but for pair in zip(rows["seed"], rows["point"], strict=True)])
    rows.loc[waits, ["final_loss", "train_loss"]] = NAN
    rows.loc[waits, "state"] = "pending"
    return rows


@pytest.mark.parametrize("point", [10, 20])
def test_an_arm_with_one_fork_takes_no_trunk_and_no_point_from_another(point):
    arms = ("bf16", "a", "b")
    family = judge(unfinished(study(trunks=range(3), arms=arms), "b", but=[(0, point)]), "bf16", None, FORKS)
    whole = judge(study(trunks=range(3), arms=arms), "bf16", None, FORKS)
    assert entered(family) == (["t0", "t1", "t2"], [10, 20])
    assert family.estimates["a"] == replace(whole.estimates["a"], p=family.estimates["a"].p)
    assert family.estimates["a"].verdict == "worse" and family.these["a"] == whole.these["a"]
    assert (family.estimates["b"].n, family.estimates["b"].verdict) == (1, "undecided")
    other = 30 - point
    assert family.left_out == (f"b: 1 of 3 trunks (without t1 and t2); the point {other} lacks forks.",)


def test_the_level_is_that_of_all_arms_that_may_get_a_verdict():
    """It does not move when an arm gets its first fork; an arm that diverged, or failed for good, leaves it."""
    arms = ("bf16", "a", "b", "c")
    rows = study(trunks=range(3), arms=arms)
    full = judge(rows, "bf16", None, FORKS).estimates["a"]
    for seeds in range(4):
        begun = unfinished(rows.copy(), "b", "c", but=[(seed, point) for seed in range(seeds) for point in (10, 20)])
        own = judge(begun, "bf16", None, FORKS).estimates["a"]
        assert (own.ci_low, own.ci_high) == (full.ci_low, full.ci_high)
    lost = unfinished(rows.copy(), "b", "c")
    lost.loc[lost["arm"] == "b", "diverged_at"], lost.loc[lost["arm"] == "c", "state"] = 640.0, "failed"
    assert judge(lost, "bf16", None, FORKS).estimates["a"].ci_low > full.ci_low
    nothing = judge(unfinished(rows.copy(), "b", "c"), "bf16", None, FORKS)
    assert nothing.left_out == ("b, c: 0 of 3 trunks.",) and nothing.apart == {"b": "unfinished", "c": "unfinished"}


def test_each_arm_has_its_own_loss_of_the_baseline():
    rows = study(trunks=range(3), arms=("bf16", "a", "b"))
    rows.loc[(rows["arm"] == "bf16") & (rows["point"] == 20), ["final_loss", "train_loss"]] = 1.0
    family = judge(unfinished(rows, "b", but=[(0, 20)]), "bf16", None, FORKS)
    assert family.losses == {"bf16": 1.5, "a": 1.5, "b": 1.0}
    assert family.points[family.points["arm"] == "b"]["point"].tolist() == [20]


def test_an_arm_that_still_runs_takes_no_seed_from_the_others():
    arms = ("bf16", "a", "b", "null")
    rows = unfinished(study(points=(0,), arms=arms), "b", but=[(0, 0), (2, 0)])
    family = judge(rows, "bf16", None, WHOLE)
    assert family.apart == {"b": "waiting"} and family.estimates["a"].n == 4
    assert family.left_out == ("b: 2 of 4 seeds; no gap before it has them all.",)
    without = judge(rows[rows["arm"] != "b"], "bf16", None, WHOLE).estimates["a"]
    assert family.estimates["a"].se == without.se and family.estimates["a"].ci_low < without.ci_low
    rows.loc[rows["state"] == "pending", "state"] = "failed"  # it has all that it will have
    ended = judge(rows, "bf16", None, WHOLE)
    assert not ended.apart and {own.n for own in ended.estimates.values()} == {2}


def test_a_null_arm_that_waits_is_no_control():
    rows = unfinished(study(points=(0,), arms=("bf16", "a", "null")), "null", but=[(1, 0)])
    family = judge(rows, "bf16", "null", WHOLE)
    assert family.apart == {"null": "waiting"} and family.estimates["a"].n == 4
    assert family.points["gap"].tolist() == pytest.approx([0.02, 0.021, 0.022, 0.023])


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
    assert family.apart == {"a": "unpaired"} and family.points.empty and not family.losses


def test_forks_that_end_together_are_judged_as_a_whole_run():
    """1 % at once and 0.02 % by each step: 3 % after 100 steps, and the interval is Student's t over trunks."""
    noise = [0.0, 0.03, -0.03, 0.0]
    rows = [("bf16", seed, point, 2.0) for seed in range(4) for point in (20, 60)]
    rows += [
        ("a", seed, point, 2.0 * (1 + 0.01 * (1 + 0.02 * (100 - point) + noise[seed])))
        for seed in range(4)
        for point in (20, 60)
    ]
    family = judge(finals(rows), "bf16", None, replace(FORKS, end=100))
    estimate, parts = family.estimates["a"], family.parts["a"]
    assert estimate.gap == pytest.approx(3.0) and estimate.verdict == "worse"
    assert estimate.ci_high - 3 == pytest.approx(3.182446 * 0.024495 / 2, rel=1e-4)
    assert parts["at_once"][0] == pytest.approx(1.0) and parts["growth"] == pytest.approx((2.0, 2.0, 2.0))
    assert family.points.groupby("trunk")["weight"].sum().tolist() == pytest.approx([1.0] * 4)
    one = judge(finals([row for row in rows if row[2] == 60]), "bf16", None, replace(FORKS, end=100))
    assert one.estimates["a"].gap == pytest.approx(1.8) and not one.parts["a"]
    alone = judge(finals([row for row in rows if row[1] == 0]), "bf16", None, replace(FORKS, end=100))
    assert alone.estimates["a"].gap == pytest.approx(3.0)
    assert all(map(math.isnan, alone.these["a"])), "an interval of the points' mean does not hold the whole run's gap"
