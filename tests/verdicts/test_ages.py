"""A line through the gaps of forks of several ages: its weights, what it covers, and what it cannot."""

import math

import numpy as np
import pytest
from scipy import stats

from hqsweep.verdicts import judging
from hqsweep.verdicts.judging import weights


def test_a_line_is_found_and_its_end_is_a_whole_run():
    ages, line = np.array([100.0, 160.0, 400.0]), lambda steps: 2.5 + 0.004 * steps
    found = weights(ages, 680)
    assert line(ages) @ found.whole == pytest.approx(line(680))
    assert line(ages) @ found.at_once == pytest.approx(2.5) and line(ages) @ found.growth == pytest.approx(0.004)
    assert found.whole.sum() == pytest.approx(1) and found.growth.sum() == pytest.approx(0, abs=1e-15)


def test_the_weights_are_those_of_least_squares():
    rng, ages = np.random.default_rng(0), np.array([40.0, 90.0, 300.0, 310.0])
    gaps, found = rng.normal(size=4), weights(ages, 500)
    line = stats.linregress(ages, gaps)
    assert gaps @ found.growth == pytest.approx(line.slope)
    assert gaps @ found.whole == pytest.approx(line.intercept + 500 * line.slope)


@pytest.mark.parametrize(
    ("ages", "says"),
    [([80], "two different"), ([80, 80], "two different"), ([80, 900], "at most"), ([0, 9], "above 0")],
)
def test_ages_that_give_no_line_are_refused(ages, says):
    with pytest.raises(ValueError, match=says):
        weights(ages, 680)


def covered(shape, seed: int = 0) -> tuple[float, float]:
    """(how often the 95 % interval holds the gap of a whole run, how often a null arm is called worse or better) over
    2,000 studies of 4 trunks; `shape`: age as a part of a whole run -> part of its gap."""
    rng, count, trunks, ages = np.random.default_rng(seed), 2000, 4, np.array([120.0, 320.0])
    own, hits, claims = weights(ages, 480), 0, 0
    for _ in range(count):
        trunk = 1 + 0.1 * rng.standard_normal((trunks, 1))
        gaps = 5.0 * trunk * shape(ages / 480) + 0.1 * rng.standard_normal((trunks, 2))
        null = 0.1 * rng.standard_normal((trunks, 2))
        real, none = (judging.judge_forks({"a": (g @ own.whole)[:, None]}, margin=0.3)["a"] for g in (gaps, null))
        hits += real.ci_low <= 5.0 <= real.ci_high
        claims += none.worse or none.better
    return hits / count, claims / count


def test_intervals_cover_the_gap_of_a_whole_run_and_claims_are_5_percent():
    coverage, claims = covered(lambda age: 0.55 + 0.45 * age)
    se = math.sqrt(0.05 * 0.95 / 2000)
    assert abs(coverage - 0.95) < 4 * se and abs(claims - 0.05) < 4 * se


def test_a_gap_that_does_not_grow_on_a_line_is_missed():
    """Negative control: where most of the growth comes early, the line goes too far, and no interval says so."""
    coverage, _ = covered(lambda age: 1 - 0.5 * np.exp(-6 * age))
    assert coverage < 0.9
