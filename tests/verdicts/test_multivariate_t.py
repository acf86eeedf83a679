"""The largest of equicorrelated t values, against scipy's own (which draws points) and the golden critical values."""

import numpy as np
import pytest
from scipy import stats

from hqsweep.verdicts.multivariate_t import critical, tail


@pytest.mark.parametrize("arms", [2, 4, 7])
@pytest.mark.parametrize("correlation", [1 / 3, 1 / 2])
@pytest.mark.parametrize(("df", "bound"), [(2.0, 4.3), (4.5, 3.0), (14.0, 2.6)])
def test_tail_is_that_of_scipy(arms, correlation, df, bound):
    shape = np.full((arms, arms), correlation) + (1 - correlation) * np.eye(arms)
    box = stats.multivariate_t(shape=shape, df=df).cdf([bound] * arms, lower_limit=[-bound] * arms, random_state=0)
    assert tail(bound, arms, correlation, df) == pytest.approx(1 - box, abs=2e-4)


def test_of_one_arm_it_is_students_t_and_of_more_it_stays_between_one_and_their_sum_far_into_the_tail():
    for df, bound in [(1, 50.0), (2, 1e4), (4, 20.0), (4, 500.0), (9, 30.0)]:
        one = 2 * stats.t.sf(bound, df)
        assert tail(bound, 1, 0.5, df) == pytest.approx(one, rel=1e-9)
        assert 1.01 * one < tail(bound, 2, 1 / 3, df) < 1.99 * one
    assert critical(0.05, 1, 0.5, 2) == pytest.approx(4.302652729911275)


def test_independent_values_of_many_degrees_of_freedom_are_sidaks():
    assert tail(3.0, 5, 0.0, 1e7) == pytest.approx(1 - (1 - 2 * stats.norm.sf(3.0)) ** 5, rel=1e-4)


@pytest.mark.parametrize("level", [0.05, 1e-3, 1e-6])
@pytest.mark.parametrize("df", [1.5, 2.0, 4.0, 14.0])
@pytest.mark.parametrize("arms", [1, 2, 4, 7, 12])
def test_critical_value_has_the_level_and_lies_below_bonferronis(level, df, arms):
    bound = critical(level, arms, 1 / 3, df)
    assert tail(bound, arms, 1 / 3, df) == pytest.approx(level, rel=1e-6)
    assert stats.t.isf(level / 2, df) <= bound + 1e-9 and bound <= stats.t.isf(level / (2 * arms), df) * 1.001
