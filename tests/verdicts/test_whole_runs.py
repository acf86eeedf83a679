"""Verdicts on runs from scratch, by hand and against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from hqsweep.errors import UserError
from hqsweep.verdicts.designs import critical_of_largest
from hqsweep.verdicts.judging import judge_whole_runs

BASELINE = [2.00, 2.10, 2.05, 1.98]


def test_one_arm_is_scipys_paired_test():
    arm = [2.03, 2.12, 2.09, 2.01]
    verdict = judge_whole_runs({"bf16": BASELINE, "mxfp8": arm}, baseline="bf16", margin=0.01)["mxfp8"]
    gaps = np.subtract(arm, BASELINE)
    expected = stats.ttest_rel(arm, BASELINE)
    low, high = expected.confidence_interval(0.95)
    assert verdict.gap == pytest.approx(gaps.mean()) and verdict.p == pytest.approx(expected.pvalue)
    assert (verdict.ci_low, verdict.ci_high) == pytest.approx((low, high))
    assert (verdict.eq_low, verdict.eq_high) == pytest.approx(expected.confidence_interval(0.9))
    assert (verdict.n, verdict.df, verdict.verdict) == (4, 3, "worse") and math.isnan(verdict.needed)


def test_guarded_pooling_by_hand():
    """Three arms and one control at two seeds: residuals about rows and columns, and the larger of both variances."""
    losses = {"bf16": [1.0, 2.0], "a": [1.0, 2.0], "b": [1.5, 2.5], "c": [1.1, 2.5]}
    verdicts = judge_whole_runs(losses, baseline="bf16", margin=0.1)
    y = np.array(list(losses.values()))
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    pooled = 2 * (residual**2).sum() / 3
    own = np.var([0.1, 0.5], ddof=1)
    assert verdicts["a"].se == verdicts["b"].se == pytest.approx(math.sqrt(pooled / 2)) and own > pooled
    assert verdicts["c"].se == pytest.approx(math.sqrt(own / 2)) and verdicts["c"].df == 1.5
    half = critical_of_largest(0.05, 3, 0.5, 1.5) * verdicts["a"].se
    assert (verdicts["a"].ci_low, verdicts["a"].ci_high) == pytest.approx((-half, half))


def test_gap_is_to_the_mean_of_baseline_and_null_arm_and_the_null_arm_has_its_own_line():
    losses = {"bf16": BASELINE, "null": [2.01, 2.09, 2.06, 1.98], "mxfp8": [2.2, 2.32, 2.26, 2.18]}
    verdicts = judge_whole_runs(losses, baseline="bf16", null="null", margin=0.02)
    assert verdicts["mxfp8"].gap == pytest.approx(np.mean(losses["mxfp8"]) - np.mean([BASELINE, losses["null"]]))
    assert verdicts["null"].p == pytest.approx(stats.ttest_rel(losses["null"], BASELINE).pvalue)
    assert [each.verdict for each in verdicts.values()] == ["equivalent", "worse"] and list(verdicts) == [
        "null",
        "mxfp8",
    ]


def test_a_resolved_gap_may_lie_within_the_margin():
    verdict = judge_whole_runs({"bf16": [1.0, 1.1, 1.2], "a": [1.0101, 1.1100, 1.2099]}, baseline="bf16", margin=0.02)[
        "a"
    ]
    assert verdict.verdict == "worse" and verdict.within_margin and not verdict.better
    assert (
        judge_whole_runs({"bf16": [1.1, 1.2], "a": [1.0, 1.101]}, baseline="bf16", margin=0.02)["a"].verdict == "better"
    )


def test_common_effects_of_seeds_cancel_exactly():
    rng = np.random.default_rng(3)
    losses = {name: rng.normal(2, 0.01, 5) for name in ("bf16", "null", "a", "b")}
    shifted = {name: np.add(each, [0, 64, -32, 16, 8]) for name, each in losses.items()}
    for name, one in judge_whole_runs(losses, baseline="bf16", null="null", margin=0.1).items():
        other = judge_whole_runs(shifted, baseline="bf16", null="null", margin=0.1)[name]
        assert other.ci_low == pytest.approx(one.ci_low, abs=1e-12) and other.p == pytest.approx(one.p)


def test_one_seed_gives_a_gap_and_no_verdict():
    verdict = judge_whole_runs({"bf16": [2.0], "a": [2.5], "b": [2.1]}, baseline="bf16", margin=0.1)["a"]
    assert (verdict.gap, verdict.n, verdict.verdict) == (0.5, 1, "undecided")
    assert all(
        math.isnan(x) for x in (verdict.se, verdict.df, verdict.ci_low, verdict.eq_high, verdict.p, verdict.needed)
    )


def test_arms_equal_in_every_digit_are_equivalent_and_a_constant_gap_has_no_test():
    same = judge_whole_runs({"bf16": BASELINE, "a": BASELINE}, baseline="bf16", margin=0.001)["a"]
    assert (same.verdict, same.p, same.ci_low, same.ci_high) == ("equivalent", 1, 0, 0) and math.isnan(same.needed)
    constant = judge_whole_runs({"bf16": [1.0, 2.0, 4.0], "a": [1.5, 2.5, 4.5]}, baseline="bf16", margin=0.001)["a"]
    assert (constant.gap, constant.verdict) == (0.5, "undecided") and math.isnan(constant.ci_low)
    assert math.isnan(constant.p)


def test_undecided_says_how_many_seeds_would_do():
    verdict = judge_whole_runs({"bf16": BASELINE, "a": [2.05, 2.09, 2.08, 2.00]}, baseline="bf16", margin=0.01)["a"]
    assert verdict.verdict == "undecided" and 5 <= verdict.needed < 20 and verdict.needed == int(verdict.needed)


def test_what_is_refused():
    with pytest.raises(ValueError, match="other replicates than each other"):
        judge_whole_runs({"bf16": [1.0, 2.0], "a": [1.0]}, baseline="bf16", margin=0.1)
    with pytest.raises(ValueError, match="'a': an array of 1 dimension"):
        judge_whole_runs({"bf16": [1.0, 2.0], "a": [1.0, math.nan]}, baseline="bf16", margin=0.1)
    with pytest.raises(UserError, match=r"seeds\.max: 3, and 4 replicates are there"):
        judge_whole_runs({"bf16": BASELINE, "a": BASELINE}, baseline="bf16", margin=0.1, maximum=3)
