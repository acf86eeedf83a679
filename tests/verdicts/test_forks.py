"""Verdicts on forks in trunks, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hqsweep.errors import UserError
from hqsweep.verdicts.judging import judge_forks, these_forks

MXFP8 = [[0.10, 0.20, 0.30], [0.12, 0.22, 0.32], [0.08, 0.18, 0.28], [0.11, 0.20, 0.30]]
NVFP4 = [[1.0, 1.4, 1.2], [1.3, 1.5, 1.7], [0.9, 1.1, 1.0], [1.2, 1.3, 1.4]]


def test_forks_are_averaged_within_a_trunk_and_trunks_have_the_t():
    verdicts = judge_forks({"mxfp8": MXFP8, "nvfp4": NVFP4}, margin=0.25)
    for name, gaps in (("mxfp8", MXFP8), ("nvfp4", NVFP4)):
        means = np.mean(gaps, axis=1)
        test = stats.ttest_1samp(means, 0)
        low, high = test.confidence_interval(1 - 0.05 / 2)
        assert (verdicts[name].ci_low, verdicts[name].ci_high) == pytest.approx((low, high))
        assert (verdicts[name].eq_low, verdicts[name].eq_high) == pytest.approx(test.confidence_interval(0.9))
        assert (verdicts[name].n, verdicts[name].df, verdicts[name].se) == (4, 3, pytest.approx(stats.sem(means)))
    assert verdicts["mxfp8"].verdict == "worse" and verdicts["mxfp8"].within_margin
    assert verdicts["nvfp4"].verdict == "worse" and not verdicts["nvfp4"].within_margin
    p = sorted(stats.ttest_1samp(np.mean(gaps, axis=1), 0).pvalue for gaps in (MXFP8, NVFP4))
    assert sorted(each.p for each in verdicts.values()) == pytest.approx([2 * p[0], max(2 * p[0], p[1])])


def test_points_that_differ_truly_widen_nothing():
    tilted = np.add(MXFP8, [-5, 0, 5])
    assert judge_forks({"a": tilted}, margin=1)["a"].se == pytest.approx(judge_forks({"a": MXFP8}, margin=1)["a"].se)


def test_the_null_arm_is_judged_alone():
    alone = judge_forks({"mxfp8": MXFP8}, margin=0.25)["mxfp8"]
    gaps = {"null": [[0.01, -0.01], [0.0, 0.01], [0.01, -0.02], [0.0, 0.01]], "mxfp8": np.array(MXFP8)[:, :2]}
    both = judge_forks(gaps, null="null", margin=0.25)
    assert list(both) == ["null", "mxfp8"] and both["null"].verdict == "equivalent"
    assert alone.ci_high - alone.gap == pytest.approx(stats.t.isf(0.025, 3) * alone.se)
    assert both["mxfp8"].ci_high - both["mxfp8"].gap == pytest.approx(stats.t.isf(0.025, 3) * both["mxfp8"].se)


def test_two_trunks_have_an_interval_and_no_verdict():
    verdict = judge_forks({"nvfp4": NVFP4[:2]}, margin=10)["nvfp4"]
    assert verdict.verdict == "undecided" and verdict.n == 2 and verdict.needed >= 3
    assert verdict.eq_high < 10 and not verdict.within_margin
    single = judge_forks({"nvfp4": NVFP4[:1]}, margin=10)["nvfp4"]
    assert single.verdict == "undecided" and single.gap == pytest.approx(1.2) and math.isnan(single.ci_low)
    assert judge_forks({"nvfp4": NVFP4[:3]}, margin=10)["nvfp4"].verdict == "worse"


def test_these_forks_of_one_trunk():
    gaps = {"a": [[1.0, 2.0, 3.0]], "b": [[1.0, 1.0, 1.3]], "null": [[0.1, -0.1, 0.2]]}
    interval = these_forks(gaps, null="null")
    half = stats.t.isf(0.05 / 4, 2) * math.sqrt(1 / 3)
    assert interval["a"] == pytest.approx((2 - half, 2 + half))
    floor, own = 0.06 / 3, np.var([1.0, 1.0, 1.3], ddof=1)
    half = stats.t.isf(0.05 / 4, 2) * math.sqrt(max(floor, own) / 3)
    assert interval["b"] == pytest.approx((1.1 - half, 1.1 + half))
    assert all(map(math.isnan, these_forks({"a": [[1.0]]})["a"]))


def test_these_forks_of_two_trunks_take_the_residual_of_trunk_and_point():
    gaps = np.array([[1.0, 2.0, 4.0], [2.0, 3.5, 4.0]])
    rows, columns = gaps.mean(1, keepdims=True), gaps.mean(0)
    square = ((gaps - rows - columns + gaps.mean()) ** 2).sum() / 2
    half = stats.t.isf(0.025, 2) * math.sqrt(square / 6)
    low, high = these_forks({"a": gaps})["a"]
    assert (low, high) == pytest.approx((gaps.mean() - half, gaps.mean() + half))
    quiet = these_forks({"a": gaps, "null": [[1.0, 1.0, 1.0]] * 2}, null="null")["a"]
    assert quiet[1] - quiet[0] == pytest.approx(2 * stats.t.isf(0.025, 2) * math.sqrt(1 / 6))


def test_each_arm_is_judged_on_its_own_trunks_and_points():
    """At the level of all three arms of the study, one of which has no trunk yet."""
    gaps = {"mxfp8": MXFP8, "nvfp4": np.array(NVFP4)[:3, :2]}
    verdicts, these = judge_forks(gaps, margin=0.25, arms=3), these_forks(gaps, arms=3)
    alone = {name: judge_forks({name: own}, margin=0.25, arms=3)[name] for name, own in gaps.items()}
    for name, own in gaps.items():
        means = np.mean(own, axis=1)
        low, high = stats.ttest_1samp(means, 0).confidence_interval(1 - 0.05 / 3)
        assert (verdicts[name].ci_low, verdicts[name].ci_high) == pytest.approx((low, high))
        assert verdicts[name].n == len(own) and verdicts[name].ci_low == alone[name].ci_low
        assert these[name] == these_forks({name: own}, arms=3)[name]
    p = {name: stats.ttest_1samp(np.mean(own, axis=1), 0).pvalue for name, own in gaps.items()}
    first, second = sorted(p, key=p.get)
    assert verdicts[first].p == pytest.approx(3 * p[first])
    assert verdicts[second].p == pytest.approx(max(3 * p[first], 2 * p[second]))


def test_the_looks_of_an_arm_are_over_its_own_trunks():
    gaps = {"a": NVFP4, "b": NVFP4[:3]}
    verdicts = judge_forks(gaps, margin=0.25, maximum=8)
    for name, own in gaps.items():
        alone = judge_forks({name: own}, margin=0.25, maximum=8, arms=2)[name]
        assert verdicts[name] == replace(alone, p=verdicts[name].p) and alone.n == len(own)
    with pytest.raises(UserError, match="4 replicates are there"):
        judge_forks(gaps, margin=0.25, maximum=3)


def test_gaps_are_finite_and_of_two_dimensions():
    for wrong in ([0.1, 0.2], [[0.1, math.nan]]):
        with pytest.raises(ValueError, match="2 dimension"):
            judge_forks({"a": wrong}, margin=1)
