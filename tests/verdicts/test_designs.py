"""Critical values, degrees of freedom and adjusted p of both designs."""

import math

import numpy as np
import pytest
from scipy import stats

from hqsweep.verdicts.designs import Forks, WholeRuns, holm

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
