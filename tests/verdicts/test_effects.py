"""Effects of factorial studies: by hand, and how often they are claimed where there are none."""

import numpy as np
import pytest

from hqsweep.config.factorial import Fraction, fraction
from hqsweep.verdicts.effects import Effect, contrasts, critical, fit, judge_effects

STUDIES = 2000


def test_effects_of_two_factors_by_hand():
    levels = [[0, 0], [1, 0], [0, 1], [1, 1]]
    gaps = np.array([[0, 1.0, 3.0, 4.5]]) + np.array([[0.0], [0.3], [-0.3]])  # a trunk's level cancels
    a, b, both = judge_effects(gaps, levels, [(0,), (1,), (0, 1)])
    assert (a.value, b.value, both.value) == pytest.approx((1.25, 3.25, 0.5))
    assert a.se == pytest.approx(0) and a.n == 3


def test_a_fraction_gives_the_effects_that_made_the_gaps():
    design, rng = fraction(6, 5), np.random.default_rng(0)
    main, pairs = rng.normal(size=6), rng.normal(size=15)
    effects = design.effects()
    signs = [np.array(design.runs) @ main]
    for (i, j), value in zip(effects[6:], pairs, strict=True):
        high = np.array(design.runs)[:, i] * np.array(design.runs)[:, j]
        signs.append(
            value * (high - 0.5 * (np.array(design.runs)[:, i] + np.array(design.runs)[:, j]))
        )  # an interaction alone
    gaps = np.tile(sum(signs), (3, 1))
    found = [effect.value for effect in judge_effects(gaps, np.array(design.runs), effects)]
    assert found == pytest.approx([*main, *pairs])


def test_least_squares_goes_on_without_an_arm_and_refuses_too_few():
    design = fraction(6, 5)
    effects = design.effects()
    gaps = np.tile(np.array(design.runs) @ np.arange(1.0, 7), (4, 1))
    without = judge_effects(gaps[:, 1:], np.array(design.runs)[1:], effects)
    assert [effect.value for effect in without[:6]] == pytest.approx([1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="do not tell"):
        contrasts(np.array(design.runs)[:20], effects)
    with pytest.raises(ValueError, match="finite"):
        judge_effects([[0.0, np.nan]], [[0], [1]], [(0,)])


def test_two_replicates_claim_nothing():
    assert not Effect(factors=(0,), value=1, n=2, se=0.01, low=0.9, high=1.1, p=0.001).resolved
    assert Effect(factors=(0,), value=1, n=3, se=0.01, low=0.9, high=1.1, p=0.001).resolved
    (one,) = judge_effects([[0.0, 1.0]], [[0], [1]], [(0,)])
    assert one.value == pytest.approx(1) and np.isnan(one.low) and not one.resolved


def noise(name: str, design: Fraction, trunks: int) -> np.ndarray:
    """Gaps [STUDIES, trunks, arms] without any effect."""
    rng = np.random.default_rng([sum(map(ord, name)), trunks, *np.array(design.runs).shape])
    arms, factors = np.array(design.runs).shape
    draws = rng.standard_t(5, (STUDIES, trunks, arms)) if name == "t5" else rng.normal(size=(STUDIES, trunks, arms))
    loud = np.zeros(factors)
    match name:
        case "loud arms 36":
            draws *= np.where(np.array(design.runs)[:, 0] == 1, 6, 1)
        case "louder with factors":
            draws *= np.sqrt(1 + 3 * np.array(design.runs).sum(1))
        case "one factor varies 36":
            loud[0] = 6
        case "half of the factors vary 36":
            loud[: (factors + 1) // 2] = 6
    slopes = rng.normal(size=(STUDIES, trunks, factors)) * loud * 2 / np.sqrt(arms)
    return draws + slopes @ (2 * np.array(design.runs) - 1).T + 3 * rng.normal(size=(STUDIES, trunks, 1))


CASES = ("equal", "t5", "loud arms 36", "louder with factors", "one factor varies 36", "half of the factors vary 36")
DESIGNS = {(2, "full"): 5.3, (3, "full"): 4.2, (4, "full"): 5.0, (6, 4): 4.0, (6, 5): 3.6}
"""(factors, resolution) -> studies in % that claim an effect without any, the most over CASES and 3, 4, 5, 8 trunks."""


@pytest.mark.parametrize(("factors", "resolution"), DESIGNS)
def test_effects_are_claimed_as_rarely_as_stated(factors, resolution):
    design, stated = fraction(factors, resolution), DESIGNS[factors, resolution] / 100
    effects = design.effects()
    weights, orders = contrasts(np.array(design.runs), effects), np.array([len(effect) for effect in effects])
    for name in CASES:
        for trunks in (3, 4, 5, 8):
            values, errors = fit(noise(name, design, trunks), weights, orders)
            claimed = (np.abs(values) > critical(len(effects), trunks) * errors).any(-1).mean()
            bound = stated + 3 * np.sqrt(stated * (1 - stated) / STUDIES)
            assert claimed <= bound, f"{name}, {trunks} trunks: {claimed:.2%}"


def test_intervals_cover_the_true_effects_together():
    design = fraction(6, 5)
    effects = design.effects()
    weights, orders = contrasts(np.array(design.runs), effects), np.array([len(effect) for effect in effects])
    true = weights @ (np.array(design.runs) @ np.arange(6.0))
    assert true[:6] == pytest.approx(np.arange(6))
    values, errors = fit(noise("equal", design, 4) + np.array(design.runs) @ np.arange(6.0), weights, orders)
    covered = (np.abs(values - true) <= critical(len(effects), 4) * errors).all(-1).mean()
    assert covered >= 0.95


def test_power_is_what_is_said():
    """A main effect of 3 of its own standard deviations over 4 trunks, in the design of conf=factorial."""
    design = fraction(6, 5)
    effects = design.effects()
    weights, orders = contrasts(np.array(design.runs), effects), np.array([len(effect) for effect in effects])
    sd = np.sqrt((weights[0] ** 2).sum())
    values, errors = fit(noise("equal", design, 4) + 3 * sd * np.array(design.runs)[:, 0], weights, orders)
    found = (np.abs(values[:, 0]) > critical(len(effects), 4) * errors[:, 0]).mean()
    assert found > 0.7
