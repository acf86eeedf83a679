"""Laws over sizes: what they find where they hold, and how often their intervals cover where they do not."""

import numpy as np
import pytest

from hqsweep.errors import UserError
from hqsweep.verdicts.ladder import Rung, hold_out, least_squares, predict, warnings

QUARTET = (1.52e5, 0.589, 5.25e5, 0.544, 0.274, 1.35)
CHINCHILLA = (406.4, 0.34, 410.7, 0.28, 1.0, 1.0)
"""A, alpha, B, beta, gamma and E of published laws."""
SIZES = (1e6, 3e6, 1e7, 3e7)
STUDIES, DRAWS = 40, 150


def loss(n: float, d: float, law: tuple[float, ...] = QUARTET) -> float:
    a, alpha, b, beta, gamma, e = law
    return e + (a / n**alpha + b / d**beta) ** gamma


def ladder(gap, sizes=SIZES, noise=0.0, rng=None, law=QUARTET, ratio=20) -> list[Rung]:
    """Sizes with gap(n, d) nats, off it by `noise` (as a share) at each size, over four replicates."""
    rng = rng or np.random.default_rng(0)
    rungs = []
    for n in sizes:
        true = gap(n, ratio * n) * (1 + noise * rng.normal())
        spread = max(0.05 * abs(true), 1e-4)
        losses = loss(n, ratio * n, law) * (1 + 0.003 * rng.normal(size=4))
        rungs.append(Rung(params=n, tokens=ratio * n, losses=losses, gaps={"a": true + spread * rng.normal(size=4)}))
    return rungs


def effective(eff_n: float, eff_d: float, law=QUARTET):
    return lambda n, d: loss(n * eff_n, d * eff_d, law) - loss(n, d, law)


def test_the_gap_that_made_the_ladder_is_found_beyond_it():
    gap = effective(0.65, 0.95)
    found = predict(ladder(gap), 1e8, 2e9)["a"]
    true = 100 * gap(1e8, 2e9) / loss(1e8, 2e9)
    assert found.low < true < found.high and found.gap == pytest.approx(true, rel=0.2)
    assert set(found.laws) == {"parts", "power"} and found.sizes == 4
    assert found.low == min(low for _, low, _ in found.laws.values())


def test_the_product_of_the_effective_parts_is_found():
    found = predict(ladder(effective(0.65, 0.95)), 1e8, 2e9)["a"]
    assert found.eff_n[1] < 0.65 < found.eff_n[2] and found.eff_d[1] < 0.95 < found.eff_d[2]


def test_an_arm_that_is_better_has_a_gap_below_zero():
    found = predict(ladder(effective(1.2, 1.05)), 1e8, 2e9)["a"]
    assert found.high < 0 and found.eff_n[0] * found.eff_d[0] > 1


def test_an_interval_grows_with_the_distance():
    rungs = ladder(effective(0.65, 0.95))
    near, far = (predict(rungs, n, 20 * n)["a"] for n in (5e7, 5e9))
    assert (far.high - far.low) / far.gap > 1.3 * (near.high - near.low) / near.gap


def drawn(kind: str, rng: np.random.Generator):
    """A gap of this kind with drawn constants, and the law of the baseline."""
    law = QUARTET if rng.random() < 0.5 else CHINCHILLA
    k, p, q = rng.uniform(0.002, 0.08), rng.uniform(-0.28, 0.15), rng.uniform(0.07, 0.52)
    kinds = {
        "parts": effective(rng.uniform(0.5, 0.98), rng.uniform(0.8, 0.99), law),
        "power": lambda n, d: k * (n / 5e6) ** -p * (d / n / 20) ** q,
        "neither": lambda n, d: k * (1 + 0.3 * np.log10(n / 5e6)),
    }
    return kinds[kind], law


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parts", "power", "neither"])
def test_intervals_cover_the_largest_size_from_the_others(kind):
    """97 to 100 % of 120 studies, whose sizes lie off their law by 10 %; also of a larger size."""
    rng, held, beyond = np.random.default_rng(len(kind)), 0, 0
    for _ in range(STUDIES):
        gap, law = drawn(kind, rng)
        rungs = ladder(gap, noise=0.1, rng=rng, law=law)
        held += hold_out(rungs, draws=DRAWS)["a"].covered
        n = 4.5 * SIZES[-1]
        found = predict(rungs, n, 20 * n, draws=DRAWS)["a"]
        beyond += found.low <= 100 * gap(n, 20 * n) / loss(n, 20 * n, law) <= found.high
    assert held >= 0.9 * STUDIES and beyond >= 0.9 * STUDIES


def test_a_gap_that_turns_round_is_missed():
    """What no law has: the check must say so."""
    rungs = ladder(lambda n, d: 0.02 if n < 2e7 else 0.2)
    held = hold_out(rungs)["a"]
    assert not held.covered and held.measured > held.prediction.high


def test_warnings_name_what_the_ladder_cannot_say():
    rungs = ladder(effective(0.65, 0.95))
    assert len(warnings(rungs, 1e8, 2e9)) == 1 and "effN and effD apart" in warnings(rungs, 1e8, 2e9)[0]
    assert any("33 times the largest size" in text for text in warnings(rungs, 1e9, 2e10))
    assert any("times the largest tokens" in text for text in warnings(rungs, 1e8, 2e10))
    two = ladder(effective(0.65, 0.95), sizes=SIZES[:2])
    assert any("2 sizes" in text for text in warnings(two, 1e7, 2e8)) and hold_out(two) == {}
    mixed = [*rungs[:2], *ladder(effective(0.65, 0.95), sizes=SIZES[2:], ratio=5)]
    assert warnings(mixed, 1e8, 1e9) == []


def test_one_size_is_no_ladder():
    with pytest.raises(UserError, match="1 size of a model; a law needs 2"):
        predict(ladder(effective(0.65, 0.95), sizes=SIZES[:1]), 1e7, 2e8)


def test_predictions_are_the_same_in_every_digit():
    rungs = ladder(effective(0.65, 0.95))
    assert predict(rungs, 1e8, 2e9, draws=50) == predict(rungs, 1e8, 2e9, draws=50)


def test_least_squares_finds_the_minimum_of_every_draw():
    target = np.array([[1.0, 3.0], [-2.0, 0.5]])
    found = least_squares(lambda x: np.column_stack([x[:, 0] - target[:, 0], x[:, 1] ** 3 - target[:, 1]]), target + 1)
    assert found == pytest.approx(np.column_stack([target[:, 0], np.cbrt(target[:, 1])]), abs=1e-4)
