"""The ratio of gap and slope, its interval and what it covers."""

import math

import numpy as np
import pytest
from scipy import special, stats

from hqsweep.verdicts.course import Slowdown, in_percent, ratio_interval, slowdown
from hqsweep.verdicts.designs import Forks, WholeRuns
from hqsweep.verdicts.judging import fit_whole_runs

T975 = float(stats.t.ppf(0.975, 3))


def test_a_gap_of_half_a_doubling_takes_41_percent_more_tokens():
    found = slowdown([0.1, 0.12], [0.2, 0.24], math.nan, math.nan)
    assert found.pct == pytest.approx(100 * (2**0.5 - 1)) and math.isnan(found.low)
    assert in_percent(-1) == pytest.approx(-50)


def test_an_arm_is_slower_exactly_where_its_gap_is_above_0():
    rng = np.random.default_rng(0)
    for _ in range(200):
        gap, slope = rng.normal(0.15, 0.1, 4), rng.normal(2, 0.2, 4)
        far = T975 * gap.std(ddof=1) / 2
        found = slowdown(gap, slope, T975, 1.0)
        assert (found.low > 0) == (gap.mean() - far > 0) and (found.high < 0) == (gap.mean() + far < 0)


def test_a_larger_error_of_the_gap_widens_the_interval_alone():
    gap, slope = np.array([0.4, 0.5, 0.3, 0.45]), np.array([2.0, 2.3, 1.9, 2.1])
    plain, wide = ratio_interval(gap, slope, T975), ratio_interval(gap, slope, T975, gap.std(ddof=1))
    assert wide[0] < plain[0] < plain[1] < wide[1]
    assert ratio_interval(gap, slope, T975, gap.std(ddof=1) / 2) == pytest.approx(plain)


def test_the_ends_are_where_a_t_test_of_the_difference_ends():
    gap, slope = np.array([0.4, 0.5, 0.3, 0.45]), np.array([2.0, 2.3, 1.9, 2.1])
    for end in ratio_interval(gap, slope, T975):
        assert stats.ttest_1samp(gap - end * slope, 0).pvalue == pytest.approx(0.05)


def test_a_slope_that_may_be_0_gives_one_end_at_most_and_one_below_0_no_slowdown():
    assert all(math.isnan(value) for value in vars(slowdown([0.1, 0.2, 0.1], [0.1, 2.0, 0.3], 4.3, 4.3)).values())
    gap, slope = np.array([0.14, 0.15, 0.135]), np.array([0.02, 0.09, 0.03])
    found = slowdown(gap, slope, 4.3, 4.3)
    assert math.isnan(found.pct) and found.low > 100 and math.isinf(found.high)
    rest = gap - math.log2(1 + found.low / 100) * slope
    assert rest.mean() / (rest.std(ddof=1) / math.sqrt(3)) == pytest.approx(4.3)
    fewer = slowdown(-gap, slope, 4.3, 4.3)
    assert (
        math.isnan(fewer.pct) and fewer.low == -100 and 1 + fewer.high / 100 == pytest.approx(1 / (1 + found.low / 100))
    )
    assert math.isnan(slowdown([0.1, 0.2], [-1.0, 0.5], 4.3, 2.9).pct)


@pytest.mark.parametrize(
    ("gaps", "slopes", "says"), [([0.1], [1.0, 2.0], "one value"), ([math.nan], [1.0], "finite"), ([], [], "one value")]
)
def test_what_is_no_pair_is_refused(gaps, slopes, says):
    with pytest.raises(ValueError, match=says):
        slowdown(gaps, slopes, 1.0, 1.0)


@pytest.mark.parametrize(
    ("pct", "trunks", "noise", "slope_noise"),
    [(0.0, 3, 0.05, 0.05), (40.0, 3, 0.05, 0.05), (1.0, 4, 0.3, 0.1), (9.0, 8, 0.1, 0.2), (40.0, 8, 0.1, 0.2)],
)
def test_intervals_cover_and_errors_are_5_percent(pct, trunks, noise, slope_noise):
    """2,000 studies of one arm: the 95 % interval covers, and an arm at the margin is inside it in 5 %."""
    rng, hits, inside, count, design = np.random.default_rng(trunks), 0, 0, 2000, Forks(arms=1)
    doublings = math.log2(1 + pct / 100)
    slopes = 12 * (1 + slope_noise * rng.standard_normal((count, trunks)))
    own = 12 * (1 + 0.05 * rng.standard_normal((count, trunks)))
    slopes += own - 12
    gaps = doublings * own + noise * rng.standard_normal((count, trunks))
    for gap, slope in zip(gaps, slopes, strict=True):
        found = slowdown(gap, slope, design.critical(trunks), design.equivalence(trunks))
        hits += found.low <= pct <= found.high
        inside += found.eq_high < pct
    se = math.sqrt(0.05 * 0.95 / count)
    assert abs(hits / count - 0.95) < 4 * se and abs(inside / count - 0.05) < 4 * se


def test_an_interval_of_one_end_covers():
    """2,000 studies whose slopes are so noisy that many may be 0: an interval misses at most 5 % of the time."""
    rng, missed, open_ends, count = np.random.default_rng(5), 0, 0, 2000
    design = Forks(arms=1)
    for _ in range(count):
        slope = 12 * (1 + 0.6 * rng.standard_normal(3))
        gap = 1.3 * 12 + 0.5 * rng.standard_normal(3)
        found = slowdown(gap, slope, design.critical(3), design.equivalence(3))
        pct = 100 * (2**1.3 - 1)
        missed += found.low > pct or found.high < pct
        open_ends += math.isinf(found.high)
    assert open_ends > count / 2 and missed / count < 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


def test_no_interval_is_narrower_than_that_of_a_known_slope():
    """Negative control: with the mean slope taken as known, large slowdowns are covered too seldom."""
    rng, covered, count, trunks = np.random.default_rng(1), 0, 2000, 4
    far = -float(special.stdtrit(trunks - 1, 0.025))
    for _ in range(count):
        slope = 12 * (1 + 0.15 * rng.standard_normal(trunks))
        gap = 6 + 0.02 * rng.standard_normal(trunks)
        half = far * gap.std(ddof=1) / 2
        covered += (gap.mean() - half) / slope.mean() <= 0.5 <= (gap.mean() + half) / slope.mean()
    assert covered / count < 0.5


@pytest.mark.parametrize(("pct", "seeds"), [(0.0, 3), (60.0, 3), (20.0, 6)])
def test_whole_runs_with_a_guarded_error_cover(pct, seeds):
    """2,000 studies of four arms from scratch, whose slopes differ over seeds by 20 %."""
    rng, count, doublings = np.random.default_rng(seeds), 2000, math.log2(1 + pct / 100)
    design, missed = WholeRuns(arms=4, controls=1), 0
    for _ in range(count):
        slope = 12 * (1 + 0.2 * rng.standard_normal(seeds))
        losses = rng.standard_normal((5, seeds)) + 3 * rng.standard_normal(seeds)
        losses[1:] += doublings * 12
        gap, error = fit_whole_runs(losses, 1, seeds)
        found = slowdown((losses[1] - losses[0]), slope, design.critical(seeds), 1.0, error[0])
        assert (found.low > 0) == (gap[0] - design.critical(seeds) * error[0] > 0) or math.isnan(found.low)
        missed += found.low > pct or found.high < pct
    assert missed / count < 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


def test_nothing_known_is_nan():
    assert all(math.isnan(value) for value in vars(Slowdown()).values())
