"""Pairing, families of arms, and the estimates that come of them, against numbers worked out by hand with scipy."""

import json
import math

import pandas as pd
import pytest
from scipy import stats

from hqsweep.errors import UserError
from hqsweep.report.compare.arms import baselines, gap_curve
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.notes import headline

GPU_STUDY = {
    "mxfp8": (0.026678, 0.004854, 0.049917),
    "float8_block_scaling": (0.017301, 0.008044, 0.023787),
    "nvfp4": (0.059116, 0.022287, 0.060356),
    "nvfp4_fwd_mxfp8_bwd_dequantized": (0.024488, 0.014567, 0.051184),
    "null": (0.020136, -0.003595, 0.047340),
}
"""Gaps in nats to bf16 (0.928036 nats) of the three seeds of reports/gpu_study."""


def whole_runs(fake, gaps, base=2.0, **changes):
    """bf16 at `base` nats in every seed, and per arm the gap of each seed; "null" is the perturbed baseline."""
    seeds = range(max(len(each) for each in gaps.values()))
    runs = [fake.Run(seed=s, final=base, fmt="bf16", **changes) for s in seeds]
    for arm, each in gaps.items():
        null = arm == "null"
        extra = {"fmt": "bf16", "init_noise": 0.01} if null else {}
        runs += [fake.Run(arm=arm, seed=s, final=base + gap, **extra, **changes) for s, gap in enumerate(each)]
    return runs


def arms_of(comparison):
    return comparison.arms.set_index("arm")


def test_one_arm_is_judged_by_students_t_over_seeds(make_sweep, fake):
    """One arm, no null arm: the t test of pairs, in % of the baseline's 2 nats."""
    gaps = [0.020, 0.026, 0.021, 0.027]
    comparison = compare(make_sweep(whole_runs(fake, {"nvfp4": gaps})))
    arm = arms_of(comparison).loc["nvfp4"]
    test = stats.ttest_rel([100 * (2 + gap) / 2 for gap in gaps], [100.0] * 4)
    low, high = test.confidence_interval(0.95)
    narrow = test.confidence_interval(0.90)
    assert (arm["gap_pct"], arm["gap"]) == pytest.approx((1.175, 0.0235))
    assert (arm["ci_low_pct"], arm["ci_high_pct"], arm["p"]) == pytest.approx((low, high, test.pvalue))
    assert (arm["eq_low_pct"], arm["eq_high_pct"]) == pytest.approx(tuple(narrow))
    assert arm["verdict"] == "worse" and arm["n"] == 4 and not arm["within_margin"]
    assert comparison.estimates["nvfp4"].gap == arm["gap_pct"] and "bf16" not in comparison.estimates


def test_gpu_study_is_judged_as_it_was_analysed_anew(make_sweep, fake):
    """Gap against the mean of bf16 and null, joint intervals, 90 % half-widths, and how many seeds would decide."""
    comparison = compare(make_sweep(whole_runs(fake, GPU_STUDY, base=0.928036)))
    arms = arms_of(comparison)
    table = {"mxfp8": (1.78, 10), "float8_block_scaling": (0.62, 64), "nvfp4_fwd_mxfp8_bwd_dequantized": (2.09, 8)}
    for arm, (gap, needed) in table.items():
        row = arms.loc[arm]
        assert (row["gap_pct"], row["half_pct"]) == pytest.approx((gap, 3.26), abs=0.01)
        assert row["gap_pct"] - row["eq_low_pct"] == pytest.approx(2.43, abs=0.01)
        assert row["verdict"] == "undecided" and row["needed"] == needed and row["more"] == needed - 3
    assert arms.at["nvfp4", "verdict"] == "worse" and arms.at["nvfp4", "gap_pct"] == pytest.approx(3.94, abs=0.01)
    null = arms.loc["null"]
    assert null["null"] and (null["gap_pct"], null["half_pct"]) == pytest.approx((2.3, 6.8), abs=0.06)
    assert math.isnan(null["needed"]) and null["sentence"].endswith("over 3 seeds.")
    assert arms.drop(["bf16", "null"])["null_in_doubt"].all()
    assert "The null arm is not shown equal to 'bf16'" in arms.at["nvfp4", "sentence"]


def test_a_gap_beyond_all_that_the_null_arm_may_be_is_not_in_doubt(make_sweep, fake):
    study = fake.fork_study(
        {
            "far": lambda trunk, point: 0.2 + 1e-3 * trunk,
            "near": lambda trunk, point: 0.01 + 1e-3 * trunk,
            "null": lambda trunk, point: 0.012 * (trunk - 1.5),
        }
    )
    comparison = compare(make_sweep(study), "bf16")
    arms = arms_of(comparison)
    assert not arms.at["null", "within_margin"] and arms.at["null", "verdict"] == "undecided"
    assert not arms.at["far", "null_in_doubt"] and arms.at["near", "null_in_doubt"]
    alone = compare(
        make_sweep(
            fake.fork_study(
                {
                    "far": lambda trunk, point: 0.2 + 1e-3 * trunk,
                    "null": lambda trunk, point: 0.012 * (trunk - 1.5),
                }
            ),
            name="far",
        ),
        "bf16",
    )
    said = headline(alone)
    assert "the null arm is shown within " in said and said.endswith(
        " % alone, so that smaller gaps would be in doubt."
    )


def by_trunk(*gaps):
    """Gaps of trunks at point 40; at 80 they are 0.001 nats larger."""
    return lambda trunk, point: gaps[trunk] + 0.001 * (point == 80)


def test_forks_are_averaged_within_a_trunk_and_trunks_are_the_replicates(make_sweep, fake):
    """Two arms at Bonferroni's 97.5 %, t with 3 degrees of freedom, in % of the fork's 2 nats."""
    nats = {"mxfp8": (0.001, 0.0012, 0.0008, 0.001), "nvfp4": (0.026, 0.030, 0.020, 0.027)}
    null = by_trunk(-0.0005, -0.0005, -0.0004, -0.0006)
    gaps = {"null": null, **{arm: by_trunk(*each) for arm, each in nats.items()}}
    comparison = compare(make_sweep(fake.fork_study(gaps)))
    arms = arms_of(comparison)
    for arm, each in nats.items():
        means = [100 * (gap + 0.0005) / 2 for gap in each]
        sem = stats.sem(means)
        half = stats.t.ppf(1 - 0.05 / 4, 3) * sem
        row = arms.loc[arm]
        assert (row["gap_pct"], row["half_pct"]) == pytest.approx((sum(means) / 4, half))
        assert row["eq_high_pct"] == pytest.approx(sum(means) / 4 + stats.t.ppf(0.95, 3) * sem)
        assert row["n"] == 4 and row["runs"] == 8
    assert arms.at["nvfp4", "verdict"] == "worse" and arms.at["null", "verdict"] == "equivalent"
    assert "trunk" not in arms.index and set(comparison.trunks.runs["arm"]) == {"trunk"}
    points = comparison.points.set_index(["arm", "trunk", "point"])
    assert points.at[("nvfp4", "trunk-s2", 80), "gap_pct"] == pytest.approx(1.05)


def test_the_training_loss_over_the_decay_decides_and_validation_stands_beside_it(make_sweep, fake):
    gaps = {"mxfp8": by_trunk(0.001, 0.0012, 0.0008, 0.001)}
    runs = fake.fork_study(gaps)
    runs = [fake.Run(**vars(run) | {"val_gap": 0.1}) if run.arm == "mxfp8" else run for run in runs]
    row = arms_of(compare(make_sweep(runs))).loc["mxfp8"]
    assert row["gap_pct"] == row["train_gap_pct"] == pytest.approx(0.075)
    assert row["val_gap_pct"] == pytest.approx(5.0) and row["gap"] == pytest.approx(0.0015)


def test_two_trunks_give_intervals_and_no_verdict(make_sweep, fake):
    row = arms_of(compare(make_sweep(fake.fork_study({"nvfp4": by_trunk(0.026, 0.030)}, trunks=2)))).loc["nvfp4"]
    assert row["verdict"] == "undecided" and row["ci_low_pct"] == pytest.approx(
        1.425 - stats.t.ppf(0.975, 1) * stats.sem([1.325, 1.525])
    )


def test_the_least_that_a_verdict_needs_is_told_where_nothing_can_be_estimated(make_sweep, fake):
    fork = arms_of(compare(make_sweep(fake.fork_study({"nvfp4": 0.02}, trunks=1), "fork"))).loc["nvfp4"]
    whole = arms_of(compare(make_sweep(whole_runs(fake, {"nvfp4": (0.02,)}), "whole"))).loc["nvfp4"]
    assert (fork["needed"], fork["more"], whole["needed"], whole["more"]) == (3, 2, 2, 1)


def test_a_missing_fork_drops_its_point_in_every_trunk_of_its_arm(make_sweep, fake):
    gaps = {"mxfp8": by_trunk(0.001, 0.0012, 0.0008, 0.001), "nvfp4": by_trunk(0.026, 0.030, 0.020, 0.027)}
    runs = fake.fork_study(gaps)
    broken = next(i for i, run in enumerate(runs) if (run.arm, run.seed, run.point) == ("mxfp8", 1, 80))
    runs[broken] = fake.Run(**vars(runs[broken]) | {"state": "failed", "reason": "killed"})
    comparison = compare(make_sweep(runs))
    own = {arm: set(rows["point"]) for arm, rows in comparison.points.groupby("arm")}
    assert own == {"mxfp8": {40}, "nvfp4": {40, 80}} and arms_of(comparison).at["mxfp8", "n"] == 4
    assert "mxfp8: the point 80 lacks forks." in comparison.notes
    assert arms_of(comparison).at["mxfp8", "gap_pct"] == pytest.approx(100 * 0.001 / 2)
    assert arms_of(comparison).at["nvfp4", "gap_pct"] == pytest.approx(100 * 0.02625 / 2)
    covers = [note for note in comparison.notes if note.startswith("The intervals of")]
    assert len(covers) == 2 and covers[0].startswith("The intervals of 'mxfp8' cover trunks of this model")
    assert "at the fork point 40." in covers[0] and "'nvfp4'" in covers[1] and "fork points 40 / 80" in covers[1]


def test_a_trunk_whose_forks_still_run_waits_and_costs_the_others_no_point(make_sweep, fake):
    runs = fake.fork_study({"nvfp4": by_trunk(0.026, 0.030, 0.020, 0.027)})
    runs = [
        fake.Run(**vars(run) | {"state": "pending"}) if (run.arm, run.seed, run.point) == ("nvfp4", 3, 80) else run
        for run in runs
    ]
    comparison = compare(make_sweep(runs))
    assert set(comparison.points["point"]) == {40, 80} and arms_of(comparison).at["nvfp4", "n"] == 3
    assert "nvfp4: 3 of 4 trunks (without trunk-s3)." in comparison.notes


def test_only_seeds_that_finished_in_every_arm_enter(make_sweep, fake):
    runs = whole_runs(fake, {"mxfp8": (0.001, 0.002, 0.001, 0.002), "nvfp4": (0.03, 0.031, 0.029, 0.03)})
    runs[-1] = fake.Run(**vars(runs[-1]) | {"state": "failed", "reason": "killed"})
    comparison = compare(make_sweep(runs))
    arms = arms_of(comparison)
    assert arms.loc[["mxfp8", "nvfp4"], "n"].tolist() == [3, 3]
    assert arms.at["mxfp8", "gap_pct"] == pytest.approx(100 * 0.004 / 3 / 2)
    assert comparison.notes[1] == "Seed 3 did not finish in every arm and enters no gap."
    (lost,) = comparison.left_out
    assert (lost.state, lost.fault) == ("failed", "killed") and lost.line in comparison.notes[0]
    said = "1 of 4 runs without a result: seed 3 failed (killed). worse than 'bf16': "
    assert arms.at["nvfp4", "sentence"].startswith(said)


def test_an_arm_that_diverged_leaves_the_family_and_takes_no_seed_along(make_sweep, fake):
    gaps = {"mxfp8": (0.001, 0.002, 0.001), "nvfp4": (0.03, 0.031, 0.029)}
    runs = whole_runs(fake, gaps)
    runs[-1] = fake.Run(
        arm="nvfp4",
        seed=2,
        nan_from=150,
        state="failed",
        reason="loss is nan at step 150; a repeat would say the same",
        steps=150,
    )
    among, alone = arms_of(compare(make_sweep(runs))), arms_of(compare(make_sweep(runs[:6], "alone")))
    assert among.at["nvfp4", "verdict"] == "diverged" and math.isnan(among.at["nvfp4", "gap_pct"])
    assert among.at["mxfp8", "n"] == 3
    assert among.at["mxfp8", "ci_high_pct"] == alone.at["mxfp8", "ci_high_pct"]  # a family of one


def test_arms_without_a_pair_or_a_result_say_so(make_sweep, fake):
    runs = [fake.Run(), fake.Run(arm="mxfp8", seed=5), fake.Run(arm="nvfp4", state="running", steps=50)]
    runs += [fake.Run(arm="mxfp4", state="failed", reason="boom", steps=50), fake.Run(arm="fp8", nan_from=190)]
    comparison = compare(make_sweep(runs))
    verdicts = arms_of(comparison)["verdict"].to_dict()
    assert verdicts == {
        "bf16": "baseline", "mxfp8": "unpaired", "nvfp4": "unfinished", "mxfp4": "failed", "fp8": "diverged",
    }  # fmt: skip
    assert "No finished seed in common with 'bf16'" in arms_of(comparison).at["mxfp8", "sentence"]
    assert "'mxfp4' (failed)" in " ".join(comparison.notes)


def test_a_baseline_that_is_judged_itself_names_the_key_that_sets_it_apart(make_sweep, fake):
    """model.init_noise as a key of the grid: with noise, the baseline is the null arm of the one without."""
    arms = [(recipe, noise) for recipe in ("bf16", "mxfp8") for noise in (0.0, 0.01)]
    runs = [
        fake.Run(arm=f"{recipe}_init_noise-{noise}", recipe=recipe, seed=s, final=2.0 + s * noise, init_noise=noise)
        for recipe, noise in arms
        for s in range(3)
    ]
    arm = arms_of(compare(make_sweep(runs))).loc["mxfp8_init_noise-0.01"]
    assert (arm["verdict"], arm["sentence"]) == (
        "unpaired",
        "No gap: 'bf16_init_noise-0.01' differs from 'bf16_init_noise-0.0' by model.init_noise and is judged against"
        " it, so no arm is paired with it.",
    )


def test_arms_with_other_seeds_than_each_other_lose_the_one_with_fewer(make_sweep, fake):
    runs = [fake.Run(seed=s, final=2.0) for s in range(4)]
    runs += [fake.Run(arm="long", seed=s, final=2.1) for s in (0, 1, 2)] + [fake.Run(arm="short", seed=3, final=2.1)]
    arms = arms_of(compare(make_sweep(runs)))
    assert arms["verdict"].to_dict() == {"bf16": "baseline", "long": "undecided", "short": "unpaired"}


def test_equal_and_undecided_and_better(make_sweep, fake):
    gaps = {"same": (0, 0, 0, 0), "better": (-0.05, -0.051, -0.05, -0.049), "noisy": (-0.01, 0.01, 0.001, 0.0)}
    runs = whole_runs(fake, gaps)
    arms = arms_of(compare(make_sweep(runs)))
    assert arms["verdict"].drop("bf16").to_dict() == {"same": "undecided", "better": "better", "noisy": "undecided"}
    alone = arms_of(compare(make_sweep(runs[:8], "alone"))).loc["same"]
    assert alone["verdict"] == "equivalent" and "equal in every digit over 4 seeds" in alone["sentence"]


def test_final_loss_is_the_last_val_loss_and_train_loss_the_trailing_mean(make_sweep, fake):
    comparison = compare(make_sweep([fake.Run()]), "bf16", window=10)
    rows = comparison.frames.metrics.set_index(["metric", "step"])["value"]
    final = comparison.finals.iloc[0]
    assert final["final_loss"] == rows["val_loss", fake.steps]
    assert final["train_loss"] == pytest.approx(rows["train_loss"].loc[fake.steps - 9 :].mean(), abs=1e-12)


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
    arms = arms_of(compare(make_sweep(runs), "bf16"))
    assert arms.at["nvfp4 train.lr=0.2", "baseline"] == "bf16 train.lr=0.2"
    assert arms.at["nvfp4 train.lr=0.2", "gap"] == pytest.approx(0.03, abs=0.03)
    assert (arms["verdict"] == "baseline").sum() == 2


def test_a_recipe_without_its_partner_is_an_error():
    runs = grid({"bf16_lr-1": ("bf16", 1), "nvfp4_lr-2": ("nvfp4", 2)})
    with pytest.raises(UserError, match=r"no run with the other values of 'nvfp4_lr-2'; give one of the arms"):
        baselines(runs, "bf16")


def grid(arms: dict[str, tuple[str, int]]) -> pd.DataFrame:
    """Runs of arms, each of a recipe and a learning rate."""
    recipes, rates = zip(*arms.values(), strict=True)
    return pd.DataFrame(
        {"arm": arms.keys(), "recipe": recipes, "design": "whole run", "config.train.lr": rates} | {"data_seen": "9f"}
    )


def test_a_recipe_of_which_fields_are_swept_is_its_arm_without_changes():
    rates = {"mxfp8_lr-1": ("mxfp8", 1), "mxfp8_lr-2": ("mxfp8", 2)}
    changed = {"mxfp8_input-nvfp4_lr-1": ("mxfp8", 1), "mxfp8_input-nvfp4_lr-2": ("mxfp8", 2)}
    partner = {arm: f"mxfp8_lr-{rate}" for arm, (_, rate) in (rates | changed).items()}
    assert baselines(grid(changed | rates), "mxfp8") == partner
    assert baselines(grid({"a_x-1_lr-1": ("a", 1), "b": ("b", 1)}), "a_x-1") == dict.fromkeys(
        ["a_x-1_lr-1", "b"], "a_x-1_lr-1"
    )
    assert baselines(grid({"mxfp8": ("mxfp8", 1)} | changed), "mxfp8") == dict.fromkeys(["mxfp8", *changed], "mxfp8")


def test_gap_curve_is_the_difference_at_equal_steps(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    curve = gap_curve(comparison, "val_loss").set_index(["arm", "step"])
    arms = arms_of(comparison)
    assert curve.loc[("nvfp4", fake.steps), "gap"] == pytest.approx(arms.at["nvfp4", "gap"], abs=1e-12)
    assert set(curve.index.get_level_values("arm")) == {"mxfp8", "nvfp4"} and (curve["n"] == 3).all()


def test_a_null_arm_has_noise_and_no_other_difference(make_sweep, fake):
    runs = make_sweep(whole_runs(fake, {"null": (0.001, -0.001), "loud": (0.0, 0.0)}))
    for run in runs:
        config = run.config()
        if run.manifest()["arm"] == "loud":
            config["model"]["init_noise"] = 0.01
            config["train"]["lr"] = 9.0
            run.config_path.write_text(json.dumps(config))
            fake.seal_again(run)
    arms = arms_of(compare(runs))
    assert arms["null"].to_dict() == {"bf16": False, "null": True, "loud": False}
    assert not arms_of(compare(runs, "loud"))["null"].any()


def test_a_null_arm_within_the_margin_is_equivalent_however_small_its_spread(make_sweep, fake):
    gaps = {"null": by_trunk(0.0001, 0.0001, 0.00011, 0.00009), "mxfp8": by_trunk(0.001, 0.0012, 0.0008, 0.001)}
    arms = arms_of(compare(make_sweep(fake.fork_study(gaps))))
    assert arms.at["null", "ci_low_pct"] > 0 and arms.at["null", "verdict"] == "equivalent"
    assert arms.at["null", "sentence"].startswith("Null arm: equivalent to 'bf16' within 0.25 %: +0.03")
    assert arms.at["mxfp8", "verdict"] == "worse" and arms.at["mxfp8", "within_margin"]


def test_forks_of_several_ages_that_end_together_say_what_a_whole_run_costs(make_sweep, fake):
    def grows(seed, point):
        return 0.02 * (1 + 0.01 * (120 - point)) + 0.0005 * seed

    runs = make_sweep(fake.fork_study({"nvfp4": grows, "null": lambda seed, point: 1e-6 * seed}, end=120, falls=0.25))
    comparison = compare(runs, "bf16", margin="1%tokens")
    row = comparison.arms.set_index("arm").loc["nvfp4"]
    assert row["end"] == 120 and row["gap_pct"] == pytest.approx(100 * (0.044 + 0.00075) / 2)
    assert row["gap"] == pytest.approx(0.044 + 0.00075)
    assert row["at_once_pct"] == pytest.approx(1.0375) and row["growth_pct"] == pytest.approx(1.0)
    assert ", as a run of 120 steps from its first step on; +1.038 % (" in row["sentence"]
    assert " comes at once, and each 100 steps add +1.000 % (" in row["sentence"]
    assert row["slope"] == pytest.approx(0.25)
    assert row["slowdown_pct"] == pytest.approx(100 * (2 ** (row["gap"] / 0.25) - 1), rel=1e-6)
    assert row["slowdown_low"] > 1 and row["verdict"] == "worse"
    assert comparison.margin_tokens == 1
    assert comparison.margin_pct == pytest.approx(100 * row["slope"] / 2 * math.log2(1.01))


def test_a_margin_in_tokens_of_a_loss_that_does_not_fall_is_said_and_replaced(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    for run in runs:
        rows = [row | ({"value": 3.0} if row["metric"] == "train_loss" else {}) for row in run.rows("metrics")]
        run.jsonl("metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fake.seal_again(run)
    comparison = compare(runs, "bf16", margin="1% tokens")
    assert comparison.margin_pct == 0.25 and comparison.arms["slowdown_pct"].isna().all()
    assert any("'bf16' does not fall with tokens" in note for note in comparison.notes)
