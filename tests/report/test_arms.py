"""The statistics: pairing by seed, Student's t, and the sentences."""

import json
import math

import pandas as pd
import pytest

from hqsweep.errors import UserError
from hqsweep.report.arms import baselines, gap_curve
from hqsweep.report.compare import compare
from hqsweep.report.paired import interval


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
    assert arms.at["noisy", "verdict"].startswith("Not resolved from 'bf16': ")


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


NULL = 0.004


def with_null(fake, gaps=(0.03, 0.002), seeds=3, noise=NULL):
    """bf16, its null arm, and arms with these gaps."""
    runs = [fake.Run(seed=s) for s in range(seeds)]
    runs += [fake.Run(arm="null", seed=s, gap=noise * (-1) ** s, init_noise=0.01, fmt="bf16") for s in range(seeds)]
    return runs + [fake.Run(arm=f"+{gap}", seed=s, gap=gap) for gap in gaps for s in range(seeds)]


def test_the_null_arm_states_the_resolution_and_nothing_below_it_is_claimed(make_sweep, fake):
    runs = make_sweep(with_null(fake))
    for run in runs:  # the recipes of bf16 and of its null arm differ in nothing but their names
        config = run.config()
        if run.manifest()["arm"] in ("bf16", "null"):
            config["recipe"]["linear"] = {"input": "bf16"}
            run.config_path.write_text(json.dumps(config))
    arms = compare(runs, "bf16").arms.set_index("arm")
    null = arms.loc["null"]
    assert arms["resolution"].nunique() == 1
    assert null["resolution"] == max(abs(null["gap_lo"]), abs(null["gap_hi"])) > NULL
    assert null["null"] and null["outcome"] == "null" and math.isnan(null["p_holm"])
    assert null["verdict"].endswith(f"resolution {null['resolution']:.4f}.")
    assert arms.at["+0.03", "outcome"] == "worse"
    assert arms.at["+0.03", "verdict"].endswith(f"; resolution {null['resolution']:.4f}.")
    small = arms.loc["+0.002"]
    assert small["p_holm"] < 0.05 and small["outcome"] == "unresolved"
    assert f"within the resolution of {null['resolution']:.4f}; {small['seeds_needed']:.0f} seeds" in small["verdict"]


def test_a_null_arm_of_another_recipe_says_nothing_of_this_baseline(make_sweep, fake):
    arms = compare(make_sweep(with_null(fake)), "+0.03").arms.set_index("arm")
    assert arms["resolution"].isna().all() and not arms["null"].any()


def test_p_is_corrected_for_the_number_of_arms(make_sweep, fake):
    runs = [
        fake.Run(arm=f"a{i}", seed=s, gap=g)
        for i, gaps in enumerate([(0.0, 0.0, 0.0), (0.010, 0.012, 0.0165), (0.01, -0.01, 0.02), (0.02, -0.02, 0.01)])
        for s, g in enumerate(gaps)
    ]
    runs = make_sweep(runs)
    alone = compare(runs[:6], "a0").arms.set_index("arm").loc["a1"]
    among = compare(runs, "a0").arms.set_index("arm").loc["a1"]
    assert alone["p_holm"] == alone["p"] == among["p"] and among["p_holm"] == pytest.approx(3 * among["p"])
    assert among["seeds_needed"] > alone["seeds_needed"]


def test_seeds_needed_for_a_stated_gap(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    own, stated = (compare(runs, "bf16", target_gap=gap).arms.set_index("arm").loc["nvfp4"] for gap in (None, 0.001))
    assert own["target_gap"] == abs(own["gap"]) and stated["target_gap"] == 0.001
    assert stated["seeds_needed"] > own["seeds_needed"] and stated["gap"] == own["gap"]
    with pytest.raises(UserError, match="target_gap: 0 nats"):
        compare(runs, "bf16", target_gap=0)
