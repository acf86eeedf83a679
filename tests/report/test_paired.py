"""Paired statistics against values worked out by hand, scipy, and the tables of textbooks."""

import math

import numpy as np
import pytest
from scipy import stats

from hqsweep.report.paired import LEVEL, POWER, holm, interval, p_value, seeds_needed


def test_interval_against_a_value_worked_out_by_hand():
    mean, low, high = interval([1.0, 2.0, 3.0])  # sd 1, t(0.975, 2) = 4.302652729911275
    half = 4.302652729911275 / math.sqrt(3)
    assert mean == 2 and low == pytest.approx(2 - half) and high == pytest.approx(2 + half)


def test_interval_of_one_value_and_of_none_is_unknown():
    mean, low, high = interval([0.25])
    assert mean == 0.25 and math.isnan(low) and math.isnan(high)
    assert all(map(math.isnan, interval([])))


def test_p_is_that_of_scipys_paired_test():
    a, b = [2.31, 2.40, 2.28, 2.35], [2.30, 2.37, 2.29, 2.31]
    gaps = np.subtract(a, b)
    assert p_value(gaps) == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    assert p_value(gaps, 0.01) == pytest.approx(stats.ttest_1samp(gaps, 0.01).pvalue, rel=1e-9)


def test_p_is_below_the_level_exactly_where_the_interval_leaves_zero_out():
    rng = np.random.default_rng(0)
    for gaps in rng.normal(0.5, 1, (200, 4)):
        _, low, high = interval(gaps)
        assert (p_value(gaps) < LEVEL) == (low > 0 or high < 0)


def test_p_without_spread_or_without_seeds():
    assert (p_value([0.0, 0.0]), p_value([0.1, 0.1]), p_value([0.1, 0.1], against=0.1)) == (1, 0, 1)
    assert math.isnan(p_value([0.1])) and math.isnan(p_value([]))


def test_holm_on_the_example_of_the_textbooks():
    claims = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": math.nan})
    assert [claims[k] for k in "abcd"] == pytest.approx([0.03, 0.06, 0.06, 0.02]) and math.isnan(claims["e"])
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_are_those_of_the_published_power_tables(effect, seeds):
    assert seeds_needed(1.0, effect) == seeds  # one-sample t, two-sided 5 %, power 80 % (as G*Power gives them)


def test_seeds_needed_find_the_gap_as_often_as_they_say():
    rng, n = np.random.default_rng(1), int(seeds_needed(1.0, -0.9, tests=5))
    claims = [p_value(gaps) < LEVEL / 5 for gaps in rng.normal(-0.9, 1, (2000, n))]
    assert POWER - 0.03 < np.mean(claims) < POWER + 0.08


def test_seeds_needed_at_the_ends():
    assert seeds_needed(0.0, 0.01) == 2 and seeds_needed(0.01, 0.0) == math.inf
    assert seeds_needed(1.0, 1e-6) == math.inf and seeds_needed(0.01, 10.0) == 2
    assert math.isnan(seeds_needed(math.nan, 0.01)) and seeds_needed(1, 1, tests=0) == seeds_needed(1, 1, tests=1)
