"""The statistics: pairing by seed, Student's t, and the sentences."""

import math

import pandas as pd
import pytest

from hqsweep.errors import UserError
from hqsweep.report.arms import baselines, gap_curve, interval, trailing
from hqsweep.report.compare import compare


def test_interval_against_a_value_worked_out_by_hand():
    mean, low, high = interval([1.0, 2.0, 3.0])  # sd 1, t(0.975, 2) = 4.302652729911275
    half = 4.302652729911275 / math.sqrt(3)
    assert mean == 2 and low == pytest.approx(2 - half) and high == pytest.approx(2 + half)


def test_interval_of_one_value_and_of_none_is_unknown():
    mean, low, high = interval([0.25])
    assert mean == 0.25 and math.isnan(low) and math.isnan(high)
    assert all(map(math.isnan, interval([])))


def test_gap_is_paired_so_the_spread_of_seeds_cancels(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    arms = comparison.arms.set_index("arm")
    finals = comparison.finals.set_index(["arm", "seed"])["final_loss"]
    expected = [finals["nvfp4", seed] - finals["bf16", seed] for seed in range(3)]
    assert arms.at["nvfp4", "gap"] == pytest.approx(sum(expected) / 3, abs=1e-12)
    assert (arms.at["nvfp4", "gap_lo"], arms.at["nvfp4", "gap_hi"]) == pytest.approx(interval(expected)[1:], abs=1e-12)
    assert arms.at["nvfp4", "gap_hi"] - arms.at["nvfp4", "gap_lo"] < arms.at["bf16", "final_sd"]
    assert arms.at["nvfp4", "outcome"] == "worse" and arms.at["nvfp4", "gap_lo"] > 0.02
    assert arms.at["bf16", "outcome"] == "baseline" and comparison.arms["arm"].iloc[0] == "bf16"


def test_final_loss_is_the_last_val_loss_and_train_loss_the_trailing_mean(make_sweep, fake):
    comparison = compare(make_sweep([fake.Run()]), "bf16", window=10)
    rows = comparison.frames.metrics.set_index(["metric", "step"])["value"]
    final = comparison.finals.iloc[0]
    assert final["final_loss"] == rows["val_loss", fake.steps]
    assert final["train_loss"] == pytest.approx(rows["train_loss"].loc[fake.steps - 9 :].mean(), abs=1e-12)


@pytest.mark.parametrize(("window", "steps"), [(10, [91, 100]), (0.5, [51, 100]), (0.001, [100, 100]), (500, [1, 100])])
def test_trailing_window_in_steps_or_as_a_fraction(window, steps):
    rows = pd.DataFrame({"run": "r", "step": range(1, 101), "value": 0.0})
    kept = trailing(rows, window)["step"]
    assert [kept.min(), kept.max()] == steps


def test_one_seed_has_a_gap_but_no_interval(make_sweep, fake):
    row = compare(make_sweep([fake.Run(), fake.Run(arm="nvfp4", gap=0.03)]), "bf16").arms.set_index("arm").loc["nvfp4"]
    assert row["gap"] > 0.02 and math.isnan(row["gap_lo"]) and row["outcome"] == "one seed"
    assert row["verdict"].endswith("one seed: no interval; add seeds.")


def test_a_failed_run_is_said_first_and_leaves_the_gap(make_sweep, fake):
    runs = fake.three_arms()
    runs[-1] = fake.Run(arm="nvfp4", seed=2, gap=9.0, state="failed", reason="loss is nan at step 137", nan_from=137)
    row = compare(make_sweep(runs), "bf16").arms.set_index("arm").loc["nvfp4"]
    assert row["seeds"] == 2 and row["gap"] < 0.1 and row["state"] == "2 finished, 1 failed"
    assert row["verdict"].startswith("1 of 3 runs without a result: seed 2 failed (loss is nan at step 137). ")


def test_arms_without_a_pair_or_a_result_say_so(make_sweep, fake):
    runs = [fake.Run(), fake.Run(arm="mxfp8", seed=5), fake.Run(arm="nvfp4", state="running", steps=50)]
    arms = compare(make_sweep(runs), "bf16").arms.set_index("arm")
    assert arms["outcome"].to_dict() == {"bf16": "baseline", "mxfp8": "unpaired", "nvfp4": "failed"}
    assert "No finished seed in common with 'bf16'" in arms.at["mxfp8", "verdict"]
    assert math.isnan(arms.at["nvfp4", "final_loss"])


def test_a_finished_run_with_nan_loss_has_no_gap(make_sweep, fake):
    runs = [fake.Run(), fake.Run(arm="nvfp4", nan_from=190)]
    row = compare(make_sweep(runs), "bf16").arms.set_index("arm").loc["nvfp4"]
    assert row["outcome"] == "failed" and math.isnan(row["gap"])
    assert "seed 0 finished without a finite val_loss" in row["verdict"]


def test_equal_and_unresolved_and_better(make_sweep, fake):
    runs = [
        fake.Run(arm=arm, seed=seed, gap=gap)
        for arm, gap in (("bf16", 0.0), ("same", 0.0), ("better", -0.05))
        for seed in range(3)
    ]
    runs += [fake.Run(arm="noisy", seed=seed, gap=gap) for seed, gap in enumerate((-0.03, 0.03, 0.001))]
    arms = compare(make_sweep(runs), "bf16").arms.set_index("arm")
    assert arms["outcome"].to_dict() == {"bf16": "baseline", "same": "equal", "better": "better", "noisy": "unresolved"}
    assert arms.at["noisy", "verdict"].startswith("No difference from 'bf16' is resolved")


def test_unknown_baseline_names_the_arms_and_the_nearest(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    with pytest.raises(
        UserError, match=r"no arm is called 'bf61' \(did you mean 'bf16'\?\); the arms are 'bf16', 'mxfp8', 'nvfp4'"
    ):
        compare(runs, "bf61")
    with pytest.raises(UserError, match="window: 0 steps"):
        compare(runs, "bf16", window=0)


def test_a_recipe_is_paired_at_equal_other_values(make_sweep, fake):
    runs = [
        fake.Run(arm=f"{recipe} train.lr={lr}", recipe=recipe, gap=gap + lr)
        for recipe, gap in (("bf16", 0.0), ("nvfp4", 0.03)) for lr in (0.1, 0.2)
    ]  # fmt: skip
    arms = compare(make_sweep(runs), "bf16").arms.set_index("arm")
    assert arms.at["nvfp4 train.lr=0.2", "baseline"] == "bf16 train.lr=0.2"
    assert arms.at["nvfp4 train.lr=0.2", "gap"] == pytest.approx(0.03, abs=0.03)
    assert (arms["outcome"] == "baseline").sum() == 2


def test_a_recipe_without_its_partner_is_an_error():
    runs = pd.DataFrame({"arm": ["bf16 lr=1", "nvfp4 lr=2"], "recipe": ["bf16", "nvfp4"]})
    with pytest.raises(UserError, match=r"no run with the other values of 'nvfp4 lr=2' \(wanted 'bf16 lr=2'\)"):
        baselines(runs, "bf16")


def test_gap_curve_is_the_difference_at_equal_steps(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    curve = gap_curve(comparison, "val_loss").set_index(["arm", "step"])
    arms = comparison.arms.set_index("arm")
    assert curve.loc[("nvfp4", fake.steps), "gap"] == pytest.approx(arms.at["nvfp4", "gap"], abs=1e-12)
    assert set(curve.index.get_level_values("arm")) == {"mxfp8", "nvfp4"} and (curve["seeds"] == 3).all()
