"""Verdicts in any metric: those of own runs to the digit, either direction, both kinds of margin, bad input."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.foreign_logs.judge import Question, document
from hqsweep.foreign_logs.logs import Reading, frame_of, judge_frame
from hqsweep.report.compare.compare import compare
from hqsweep.verdicts import judging
from hqsweep.verdicts.designs import WholeRuns
from hqsweep.verdicts.judging import flags
from tests.report.conftest import fork_study, three_arms, write_sweep

BASELINE, NEAR, FAR = [2.31, 2.29, 2.30, 2.32], [2.3102, 2.2899, 2.3001, 2.3201], [2.34, 2.31, 2.33, 2.35]


def judged(values, margin="0.25%", metric="loss", window=None, **question):
    frame = frame_of(values, metric) if isinstance(values, dict) else values
    named = Question(metric=metric, margin=margin, **question)
    return judge_frame(frame, named, Reading(columns={}, window=window))


def verdicts(judgement) -> dict[str, str]:
    return dict(zip(judgement.arms["arm"], judgement.arms["verdict"], strict=True))


@pytest.mark.parametrize("margin", ["0.25%", 0.004])
def test_estimates_are_those_of_whole_runs(margin):
    values = {"bf16": BASELINE, "near": NEAR, "far": FAR, "null": [2.3101, 2.2901, 2.2999, 2.3202]}
    judgement = judged(values, margin, null_arm="null")
    scale = 100 / np.mean(BASELINE) if margin == "0.25%" else 1.0
    scaled = {arm: 100 * np.array(own) / np.mean(BASELINE) if scale != 1 else own for arm, own in values.items()}
    expected = judging.judge_whole_runs(scaled, baseline="bf16", null="null", margin=0.25 if scale != 1 else margin)
    assert judgement.estimates == expected
    assert verdicts(judgement) == {
        "bf16": "baseline", "null": "equivalent", "near": "equivalent", "far": "worse",
    }  # fmt: skip


def test_logs_of_own_whole_runs_give_the_verdicts_of_compare(tmp_path):
    write_sweep(tmp_path / "runs/own", three_arms())
    own = compare(hq.Sweep(tmp_path / "runs/own").folders, window=0.2, margin=0.25)
    judgement = judged(own.frames.metrics, metric="val_loss", window=0.2)
    assert judgement.estimates == own.estimates and len(own.estimates) == 2
    compared, here = own.arms.set_index("arm"), judgement.arms.set_index("arm")
    assert all(here.at[arm, "verdict"] == compared.at[arm, "verdict"] for arm in own.estimates)


def test_logs_of_own_forks_give_the_verdicts_of_compare(tmp_path):
    gaps = {"null": lambda s, p: 1e-5 * s, "a": lambda s, p: 0.02 + 0.001 * s + p / 1e5, "b": lambda s, p: -1e-4 * s}
    write_sweep(tmp_path / "runs/own", fork_study(gaps))
    own = compare(hq.Sweep(tmp_path / "runs/own").folders, margin=0.25)
    rows = own.finals[["arm", "trunk", "point", "train_loss"]]
    judgement = judged(rows, metric="train_loss", null_arm="null")
    assert judgement.design == "fork" and judgement.estimates == own.estimates
    assert verdicts(judgement)["a"] == "worse"


def test_higher_is_better_turns_the_verdicts_and_not_the_gaps():
    accuracy = {arm: [100 - value for value in own] for arm, own in (("bf16", BASELINE), ("far", FAR))}
    (far,) = document(judged(accuracy, metric="val_acc", margin=0.004))["arms"]
    assert far["verdict"] == "worse" and far["gap"] == far["metric_gap"] == pytest.approx(-0.0275)
    assert far["sentence"].startswith("worse than 'bf16' by 0.0275 (95 % interval -0.")
    assert verdicts(judged(accuracy, metric="val_acc", margin=0.004, lower=True))["far"] == "better"
    with pytest.raises(UserError, match="its name does not say which direction is better; give --lower-is-better"):
        judged(accuracy, metric="x")


def test_negative_means_keep_the_sign_of_a_gap():
    reward = {"bf16": [-2.0, -2.1, -1.9], "a": [-1.5, -1.6, -1.41]}
    (arm,) = document(judged(reward, metric="reward", margin="1%"))["arms"]
    assert arm["verdict"] == "better" and arm["gap"] > 20


def test_words_are_those_of_the_metric():
    relative = document(judged({"bf16": BASELINE, "a": FAR}, metric="bpb"))
    absolute = document(judged({"bf16": BASELINE, "a": FAR}, "0.001", metric="bpb"))
    assert relative["unit"] == "% of the baseline's mean" and " %" in relative["arms"][0]["sentence"]
    assert absolute["unit"] == "bpb" and "nats" not in str((relative, absolute))
    assert absolute["arms"][0]["sentence"].replace("(95 % interval", "").count("%") == 0


@pytest.mark.parametrize("margin", ["0", "-1%", "x", "nan", "inf", True, ""])
def test_a_margin_that_is_none(margin):
    with pytest.raises(UserError, match=r"margin: got .*; it takes a part of the baseline's mean, as in 0.25%, or"):
        judged({"bf16": BASELINE, "a": FAR}, margin)


def test_a_part_of_a_mean_around_zero_is_refused():
    values = {"bf16": [-0.1, 0.2], "a": [0.1, 0.3]}
    with pytest.raises(UserError, match=r"both signs, or are 0; give a number in the metric's unit, as in --margin"):
        judged(values)
    assert verdicts(judged(values, 0.01))["a"] == "undecided"


def test_one_seed_gives_no_interval():
    one = judged({"bf16": [2.3], "a": [2.4]})
    assert one.arms["sentence"].iloc[1] == (
        "undecided against 'bf16': +4.35 % over one seed, which gives no interval; a verdict needs at least 1 more."
    )


def test_seeds_that_only_some_arms_have_are_left_out_by_name():
    fewer = judged({"bf16": BASELINE, "near": NEAR[:3], "far": FAR})
    assert fewer.left_out == ("Seed 3 has no value in 'near' and enters no gap.",)
    whole = judged({"bf16": BASELINE[:3], "near": NEAR[:3], "far": FAR[:3]})
    assert fewer.estimates == whole.estimates
    assert fewer.arms.drop(columns="runs").equals(whole.arms.drop(columns="runs"))


def test_an_arm_without_a_seed_in_common_is_apart():
    apart = judged({"bf16": BASELINE, "far": FAR, "other": {7: 2.3, 8: 2.4}})
    assert verdicts(apart) == {"bf16": "baseline", "far": "worse", "other": "unpaired"}
    assert [arm["apart"] for arm in document(apart)["arms"]] == [None, "unpaired"]


def test_an_arm_with_nan_has_no_verdict_and_the_others_keep_theirs():
    broken = judged({"bf16": BASELINE, "far": FAR, "a": [2.3, float("nan"), 2.3, 2.3]})
    assert broken.estimates == judged({"bf16": BASELINE, "far": FAR}).estimates and not broken.left_out
    assert broken.arms.set_index("arm").at["a", "sentence"] == "No verdict: seed 1 ends at nan."
    baseline = judged({"bf16": [*BASELINE, float("nan")], "far": [*FAR, 2.3]})
    assert "seed 4 ends at nan, and enters no gap" in baseline.arms["sentence"].iloc[0]
    assert baseline.left_out and baseline.estimates == judged({"bf16": BASELINE, "far": FAR}).estimates


def test_a_baseline_that_is_not_there_and_no_other_arm():
    with pytest.raises(UserError, match=r"baseline: no arm is called 'bf61' \(did you mean 'bf16'\?\); the arms are"):
        judged({"bf16": BASELINE, "a": FAR}, baseline="bf61")
    with pytest.raises(
        UserError, match=r"baseline: which arm is it\? Name one with --baseline; the arms are 'sgd', 'muon'"
    ):
        judged({"sgd": BASELINE, "muon": FAR})
    with pytest.raises(UserError, match="'bf16' is the only arm"):
        judged({"bf16": BASELINE})
    with pytest.raises(UserError, match="null arm: 'bf16' is the baseline"):
        judged({"bf16": BASELINE, "a": FAR}, null_arm="bf16")
    with pytest.raises(UserError, match="501 arms, such as 'a0'; 500 at most"):
        judged({f"a{place}": [1.0, 2.0] for place in range(501)}, baseline="a0")


def test_forks_without_points_and_unbalanced_ones():
    rows = [("t0", "bf16", 2.0), ("t1", "bf16", 2.1), ("t2", "bf16", 2.0), ("t0", "a", 2.1), ("t1", "a", 2.2)]
    frame = pd.DataFrame(rows, columns=["trunk", "arm", "loss"])
    two = judged(frame, 0.01)
    assert two.left_out == ("Trunk t2 lacks forks and enters no gap.",) and two.estimates["a"].n == 2
    assert "says nothing about all trunks" in two.arms["sentence"].iloc[1]
    full = judged(pd.concat([frame, pd.DataFrame([("t2", "a", 2.1001)], columns=list(frame))]), 0.01)
    gaps = [[2.1 - 2.0], [2.2 - 2.1], [2.1001 - 2.0]]
    assert full.estimates == judging.judge_forks({"a": gaps}, margin=0.01) and verdicts(full)["a"] == "worse"


STUDIES = 2000


def test_the_error_rate_of_an_accuracy():
    """Accuracies of 500 items that share their seed's level: at most 5 % of studies without a gap claim one, and at
    most 5 % of arms whose gap is the margin are equivalent."""
    rng, seeds, margin = np.random.default_rng(48), 5, 0.03
    level = rng.beta(60, 40, (STUDIES, 1, seeds))
    shares = np.broadcast_to(level, (STUDIES, 4, seeds))
    values = rng.binomial(500, shares) / 500
    design = WholeRuns(arms=3, controls=1)
    worse, better, _ = flags(partial(judging.fit_whole_runs, values, 1), design, seeds, margin)
    assert (worse | better).any(-1).mean() <= 0.05 + 3 * (0.05 * 0.95 / STUDIES) ** 0.5
    shifted = values - np.array([0, margin, margin, margin])[:, None]
    *_, within = flags(partial(judging.fit_whole_runs, shifted, 1), design, seeds, margin)
    assert within.mean(0).max() <= 0.05 + 3 * (0.05 * 0.95 / STUDIES) ** 0.5
    for study in range(5):  # which are what users are shown: fewer correct answers are worse
        said = judged(dict(zip(("bf16", "a", "b", "c"), values[study], strict=True)), margin, metric="acc").estimates
        flagged = [(each.worse, each.better) for each in said.values()]
        assert flagged == [*zip(better[study].tolist(), worse[study].tolist(), strict=True)]
