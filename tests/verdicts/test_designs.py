"""Critical values, degrees of freedom and adjusted p of both designs; the largest of equicorrelated t values against
scipy's own (which draws points)."""

import math

import numpy as np
import pytest
from scipy import stats

from hqsweep.verdicts.designs import Forks, WholeRuns, critical_of_largest, holm, tail_of_largest

GOLDEN = {(2, 3): 3.920, (2, 5): 2.893, (4, 2): 6.719, (4, 3): 3.927, (4, 5): 3.081, (4, 8): 2.795, (7, 3): 4.379,
          (7, 8): 3.040}  # fmt: skip
"""The 95 % point of the largest |t| by (arms, seeds), with a null arm."""


@pytest.mark.parametrize(("arms", "seeds"), GOLDEN)
def test_critical_values_of_whole_runs(arms, seeds):
    assert WholeRuns(arms=arms, controls=2).critical(seeds) == pytest.approx(GOLDEN[arms, seeds], abs=0.002)


def test_one_arm_has_students_t():
    for controls in (1, 2):
        design = WholeRuns(arms=1, controls=controls)
        assert design.df(4) == 3 and design.critical(4) == pytest.approx(stats.t.isf(0.025, 3))
    assert design.p(np.array([2.5]), 4)[0] == pytest.approx(2 * stats.t.sf(2.5, 3))


def test_degrees_of_freedom_of_the_guard():
    with_null = {arms: WholeRuns(arms=arms, controls=2).df(3) for arms in (2, 3, 7)}
    without = {arms: WholeRuns(arms=arms, controls=1).df(3) for arms in (2, 3, 7)}
    assert with_null == {2: 3.0, 3: 4.0, 7: 4.0} and without == {2: 2.5, 3: 3.0, 7: 3.0}


def test_p_is_below_the_level_where_the_gap_is_beyond_the_critical_value():
    design = WholeRuns(arms=4, controls=2)
    bound = design.critical(3)
    below, above = design.p(np.array([bound * 1.001, bound * 0.999]), 3)
    assert below < 0.05 < above


def test_forks_take_bonferronis_interval_and_the_same_equivalence():
    design = Forks(arms=3)
    assert design.critical(4) == pytest.approx(stats.t.isf(0.05 / 6, 3)) and design.df(4) == 3
    assert design.equivalence(4) == WholeRuns(arms=3, controls=2).equivalence(4) == pytest.approx(stats.t.isf(0.05, 3))


def test_holm_on_the_example_of_the_textbooks():
    corrected = holm(np.array([0.01, 0.04, 0.03, 0.005, math.nan]))
    assert corrected[:4] == pytest.approx([0.03, 0.06, 0.06, 0.02]) and math.isnan(corrected[4])
    assert holm(np.array([0.6, 0.7])).tolist() == [1.0, 1.0] and holm(np.array([])).size == 0


@pytest.mark.parametrize("arms", [2, 4, 7])
@pytest.mark.parametrize("correlation", [1 / 3, 1 / 2])
@pytest.mark.parametrize(("df", "bound"), [(2.0, 4.3), (4.5, 3.0), (14.0, 2.6)])
def test_tail_is_that_of_scipy(arms, correlation, df, bound):
    shape = np.full((arms, arms), correlation) + (1 - correlation) * np.eye(arms)
    box = stats.multivariate_t(shape=shape, df=df).cdf([bound] * arms, lower_limit=[-bound] * arms, random_state=0)
    assert tail_of_largest(bound, arms, correlation, df) == pytest.approx(1 - box, abs=2e-4)


def test_of_one_arm_it_is_students_t_and_of_more_it_stays_between_one_and_their_sum_far_into_the_tail():
    for df, bound in [(1, 50.0), (2, 1e4), (4, 20.0), (4, 500.0), (9, 30.0)]:
        one = 2 * stats.t.sf(bound, df)
        assert tail_of_largest(bound, 1, 0.5, df) == pytest.approx(one, rel=1e-9)
        assert 1.01 * one < tail_of_largest(bound, 2, 1 / 3, df) < 1.99 * one
    assert critical_of_largest(0.05, 1, 0.5, 2) == pytest.approx(4.302652729911275)


def test_independent_values_of_many_degrees_of_freedom_are_sidaks():
    assert tail_of_largest(3.0, 5, 0.0, 1e7) == pytest.approx(1 - (1 - 2 * stats.norm.sf(3.0)) ** 5, rel=1e-4)


@pytest.mark.parametrize("level", [0.05, 1e-3, 1e-6])
@pytest.mark.parametrize("df", [1.5, 2.0, 4.0, 14.0])
@pytest.mark.parametrize("arms", [1, 2, 4, 7, 12])
def test_critical_value_has_the_level_and_lies_below_bonferronis(level, df, arms):
    bound = critical_of_largest(level, arms, 1 / 3, df)
    assert tail_of_largest(bound, arms, 1 / 3, df) == pytest.approx(level, rel=1e-6)
    assert stats.t.isf(level / 2, df) <= bound + 1e-9 and bound <= stats.t.isf(level / (2 * arms), df) * 1.001
