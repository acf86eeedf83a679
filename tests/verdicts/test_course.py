"""The course of a gap: what it says of known curves, and how often it errs, with noise whose rows depend on each
other as those of paired runs do."""

import math

import numpy as np
import pytest

from hqsweep.verdicts.course import FEWEST_ROWS, course
from hqsweep.verdicts.designs import Forks

STUDIES = 600
EVERY = 10
STEPS = np.arange(EVERY, 301, EVERY) - EVERY / 2
MARGIN = 0.25


def at_most(rate, stated, studies=STUDIES):
    return rate <= stated + 3 * math.sqrt(stated * (1 - stated) / studies)


def curves(trunks, *, lasting=0.0, shock=0.0, tau=30.0, growth=0.0, drift=0.0, noise=0.1, rho=0.7, studies=STUDIES):
    """[studies, trunks, rows] in %. Parts differ between trunks; the noise of a row has the correlation rho with the
    row before it and grows with the steps, and `drift` is the sd at the end of a random walk, as runs part."""
    rng = np.random.default_rng([trunks, int(100 * shock), int(tau), int(1000 * growth), int(10 * drift)])
    draw = lambda *rows: rng.normal(size=(studies, trunks, *rows))  # noqa: E731
    rows, state = [], draw()
    for _ in STEPS:
        state = rho * state + math.sqrt(1 - rho**2) * draw()
        rows.append(state)
    noisy = noise * np.sqrt(0.3 + STEPS / STEPS[-1]) * np.stack(rows, axis=-1)
    noisy += drift * np.cumsum(draw(len(STEPS)), -1) / math.sqrt(len(STEPS))
    parts = lasting + 0.05 * draw(1) + shock * (1 + 0.2 * draw(1)) * np.exp(-STEPS / tau)
    return parts + growth / 100 * STEPS * (1 + 0.2 * draw(1)) + noisy


def found(arms=1, **known):
    design = Forks(arms=arms)
    return [course(one, STEPS, design, MARGIN) for one in curves(**known)]


def share(courses, end):
    return np.mean([one.end in end for one in courses])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunks", "known"),
    [(3, {}), (3, {"drift": 0.2}), (4, {"shock": 1.1}), (8, {"shock": 1.1}), (8, {"drift": 0.2})],
)
def test_flat_ends_are_called_otherwise_as_rarely_as_stated_and_intervals_hold_what_lasts(trunks, known):
    true = 0.3
    courses = found(trunks=trunks, lasting=true, **known)
    assert at_most(share(courses, ("growing", "closing")), 0.05)
    assert np.mean([not len(one.fitted) for one in courses]) < 0.03
    lasting = [one.lasting for one in courses if one.end == "flat" and len(one.fitted)]
    assert len(lasting) > (50 if trunks == 3 else 120)
    missed = np.mean([not low <= true <= high for _, low, high in lasting])
    assert at_most(missed, 0.05, len(lasting)), f"{missed:.3f} of {len(lasting)}"


@pytest.mark.parametrize(("trunks", "known"), [(3, {}), (4, {"shock": 1.0, "tau": 10.0}), (8, {})])
def test_an_end_that_changes_by_the_margin_is_called_flat_as_rarely_as_stated(trunks, known):
    """140 steps lie between the first and the last row of the half."""
    courses = found(trunks=trunks, growth=MARGIN / 1.4, **known)
    assert at_most(share(courses, ("flat",)), 0.05)
    assert share(courses, ("closing",)) < 0.01


@pytest.mark.slow
def test_four_arms_together_claim_as_rarely_as_one():
    claims = [share(found(arms=4, trunks=4, lasting=0.1 * arm), ("growing", "closing")) for arm in range(4)]
    assert at_most(sum(claims), 0.05)


def test_a_test_of_single_rows_does_fail():
    """Rows as replicates: with a correlation of 0.7 a flat end is called a slope four times as often as stated."""
    from scipy import stats

    p = [stats.linregress(STEPS[15:], one[0, 15:]).pvalue for one in curves(3, lasting=0.3)]
    assert not at_most(np.mean(np.array(p) < 0.05), 0.05) and np.mean(np.array(p) < 0.05) > 0.15


def test_a_shock_that_heals_slowly_is_still_closing_and_the_steps_that_it_takes_are_forecast():
    """1.1 exp(-s / 200) changes by half of the margin over the second half of 816 steps: 521 more."""
    courses = found(trunks=8, lasting=0.3, shock=1.1, tau=200.0, noise=0.03)
    assert share(courses, ("closing",)) > 0.95
    assert np.median([one.more for one in courses if one.end == "closing"]) == pytest.approx(521, rel=0.15)
    assert all(math.isnan(one.lasting[0]) for one in courses if one.end != "flat")


def test_growth_is_found():
    courses = found(trunks=8, lasting=0.3, shock=1.0, growth=0.5, studies=200)
    assert share(courses, ("growing",)) > 0.95
    assert np.mean([one.slope[0] for one in courses]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("tau", [8.0, 25.0, 60.0])
def test_a_curve_without_noise_gives_its_parts(tau):
    exact = 0.3 + 1.1 * np.exp(-STEPS / tau)
    (one,) = [course(exact + 1e-6 * curves(4, studies=1)[0], STEPS, Forks(arms=1), MARGIN)]
    assert one.end != "open" and one.at_once[0] == pytest.approx(exact[0], abs=1e-4)
    if one.end == "flat":
        assert one.lasting[0] == pytest.approx(0.3, abs=0.01)
        assert one.fitted == pytest.approx(exact, abs=0.01)


def test_a_curve_of_another_shape_has_no_lasting_part():
    bump = 0.5 * np.exp(-(((STEPS - 60) / 30) ** 2)) + 1e-3 * curves(8, studies=1)[0]
    one = course(bump, STEPS, Forks(arms=1), MARGIN)
    assert one.end in ("flat", "closing") and not len(one.fitted) and math.isnan(one.lasting[0])


def test_few_trunks_or_rows_have_no_course():
    enough = curves(3, studies=1)[0]
    assert course(enough, STEPS, Forks(arms=1), MARGIN) is not None
    assert course(enough[:2], STEPS, Forks(arms=1), MARGIN) is None
    few = FEWEST_ROWS - 1
    assert course(enough[:, :few], STEPS[:few], Forks(arms=1), MARGIN) is None
    with pytest.raises(ValueError, match="must be finite, a row of curves for each trunk"):
        course(enough, STEPS[1:], Forks(arms=1), MARGIN)
