"""False alarms on synthetic curves: sweeps without any real difference, judged as the gate and the comparison judge.

What reports/benchmarks/null_sweeps.md measures on trained models, with more sweeps and more arms.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hqsweep.report.curves import trailing
from hqsweep.report.gate import ALARM_LEVEL, decide
from hqsweep.report.paired import LEVEL, holm, p_value

SWEEPS, STEPS = 1500, 40


def final_losses(rng: np.random.Generator, seeds: int, gap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Trailing losses [seeds] of a baseline and of one arm: the seed's level and batches in common, noise apart."""
    curve = 2 + 3 / np.sqrt(np.arange(1, STEPS + 1)) + rng.normal(0, 0.3, (seeds, 1)) + rng.normal(0, 0.1, STEPS)
    arms = (curve + shift + rng.normal(0, 0.02, (seeds, 1)) + rng.normal(0, 0.02, curve.shape) for shift in (0, gap))
    return tuple(np.array([_trailing_mean(losses) for losses in arm]) for arm in arms)


def _trailing_mean(losses: np.ndarray) -> float:
    return losses[-4:].mean()


def gaps(rng: np.random.Generator, arms: int, seeds: int, gap: float = 0.0) -> dict[int, np.ndarray]:
    pairs = (final_losses(rng, seeds, gap) for _ in range(arms))
    return {arm: new - old for arm, (old, new) in enumerate(pairs)}


def at_most(alarms: list[bool], level: float) -> bool:
    """Whether this many alarms are what a rate of `level` may well give (1 in 1000 otherwise)."""
    return stats.binomtest(sum(alarms), len(alarms), level, alternative="greater").pvalue > 1e-3


def test_the_mean_taken_here_is_that_of_the_trailing_window():
    rows = pd.DataFrame({"run": "r", "step": range(1, STEPS + 1), "value": np.arange(STEPS) ** 2.0})
    assert trailing(rows, 0.1)["value"].mean() == _trailing_mean(rows["value"].to_numpy())


@pytest.mark.slow
@pytest.mark.parametrize(("arms", "seeds"), [(1, 3), (5, 3), (5, 2)])
def test_sweeps_without_a_difference_alarm_at_most_at_the_stated_level(arms, seeds):
    rng = np.random.default_rng([arms, seeds])
    sweeps = [gaps(rng, arms, seeds) for _ in range(SWEEPS)]
    gated = ["regression" in decide(sweep, 0.0).values() for sweep in sweeps]
    claimed = [any(p < LEVEL for p in holm({a: p_value(v) for a, v in sweep.items()}).values()) for sweep in sweeps]
    assert at_most(gated, ALARM_LEVEL) and at_most(claimed, LEVEL)
    assert sum(gated) and sum(claimed)  # and the level is used: a gate that never speaks would pass too
    assert sum("regression" in decide(sweep, 0.05).values() for sweep in sweeps) < sum(gated)


def test_a_real_difference_is_found_and_a_harmless_one_passes():
    rng = np.random.default_rng(0)
    worse = [decide(gaps(rng, 1, 5, gap=0.15), 0.01)[0] for _ in range(200)]
    assert worse.count("regression") > 190
    same = [decide(gaps(rng, 1, 5), 0.15)[0] for _ in range(200)]
    assert same.count("pass") > 190
