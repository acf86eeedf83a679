"""How often verdicts are wrong, over 2,000 simulated studies a case: no oftener than the procedure was found to be.

Rates are asserted to lie within three standard errors of the stated ones; the same assertion fails on procedures that
are known to be wrong (pooled variances, forks as replicates, looks without correction).
"""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from hqsweep.verdicts import judging
from hqsweep.verdicts.designs import Forks, WholeRuns, critical_of_largest
from hqsweep.verdicts.judging import flags, weights

STUDIES = 2000
FAR = 100.0
"""A margin that many sds lie below, in sds."""


def at_most(rate: float, stated: float) -> bool:
    """Whether a rate over STUDIES agrees with at most `stated`, both shares."""
    return rate <= stated + 3 * np.sqrt(max(stated, 0.002) * (1 - stated) / STUDIES)


def noise(name: str, arms: int, seeds: int, controls: int = 2) -> np.ndarray:
    """Losses [STUDIES, controls + arms, seeds] without any gap: the baseline, the null arm, the arms."""
    rng = np.random.default_rng([sum(map(ord, name)), arms, seeds, controls])
    total = controls + arms
    draws = rng.standard_t(5, (STUDIES, total, seeds)) if name == "t5" else rng.normal(size=(STUDIES, total, seeds))
    factor = rng.normal(size=(STUDIES, 1, seeds))
    variances = np.ones(total)
    match name:
        case "loud arm 6" | "loud arm 36":
            variances[controls] = int(name.split()[-1])
        case "loud arms 6":
            variances[controls:] = 6
        case "graded 6":
            variances[controls:] = np.linspace(1, 6, arms)
        case "loud baseline 6":
            variances[0] = 6
        case "star":
            signs = np.where(np.arange(total) == 0, -1, 1)[:, None]
            draws = np.sqrt(0.5) * (signs * factor + draws)
        case "shared arms":
            draws[:, controls:] = np.sqrt(0.8) * factor + np.sqrt(0.2) * draws[:, controls:]
    return np.sqrt(variances)[:, None] * draws + 2 * rng.normal(size=(STUDIES, 1, seeds))


def runs(name: str, arms: int, seeds: int, controls: int = 2, maximum: int | None = None) -> tuple[float, float, float]:
    """Shares of studies of whole runs: any arm claimed; any arm worse; and, most over arms, an arm whose gap is the
    margin called equivalent."""
    losses, design = noise(name, arms, seeds, controls), WholeRuns(arms=arms, controls=controls, maximum=maximum)
    worse, better, _ = flags(partial(judging.fit_whole_runs, losses, controls), design, seeds, FAR)
    shifted = losses + np.where(np.arange(controls + arms) < controls, 0, FAR)[:, None]
    *_, within = flags(partial(judging.fit_whole_runs, shifted, controls), design, seeds, FAR)
    return (worse | better).any(-1).mean(), worse.any(-1).mean(), within.mean(0).max()


FAMILY = {
    (1, "equal"): (5.2, 5.0, 4.9, 5.2, 4.8), (1, "t5"): (4.7, 4.5, 4.6, 4.6, 4.5),
    (2, "equal"): (0.5, 1.0, 1.5, 1.9, 2.6), (2, "loud arm 6"): (1.2, 2.7, 3.6, 3.9, 3.5),
    (2, "loud arms 6"): (0.9, 2.0, 3.1, 3.5, 4.0), (2, "shared arms"): (0.8, 1.7, 2.4, 2.7, 3.3),
    (4, "equal"): (0.2, 0.7, 1.1, 1.5, 2.2), (4, "t5"): (0.2, 0.5, 0.9, 1.2, 1.9),
    (4, "loud arm 6"): (0.8, 2.3, 2.8, 3.0, 2.6), (4, "loud arm 36"): (4.9, 5.2, 4.3, 3.6, 2.6),
    (4, "loud baseline 6"): (0.4, 1.2, 1.7, 2.0, 2.6), (4, "star"): (0.4, 1.0, 1.4, 1.9, 2.7),
    (4, "shared arms"): (1.0, 2.3, 3.5, 3.9, 3.9),
    (7, "equal"): (0.0, 0.2, 0.7, 0.9, 1.7), (7, "shared arms"): (0.4, 2.2, 3.2, 4.0, 4.2),
}  # fmt: skip
"""Studies in % with any claim, at 2, 3, 4, 5 and 8 seeds."""
SEEDS = (2, 3, 4, 5, 8)


@pytest.mark.parametrize(("arms", "name"), FAMILY)
def test_whole_runs_claim_as_rarely_as_stated(arms, name):
    for seeds, stated in zip(SEEDS, FAMILY[arms, name], strict=True):
        claimed, worse, _ = runs(name, arms, seeds)
        assert at_most(claimed, stated / 100), f"{name}, {arms} arms, {seeds} seeds: {claimed:.2%}, stated {stated} %"
        assert at_most(worse, 0.025)


EQUIVALENT = {
    (1, "equal"): (5.3, 4.9, 5.1, 5.0, 4.9), (4, "equal"): (0.0, 0.5, 1.3, 1.8, 3.0),
    (4, "loud arm 6"): (0.5, 3.0, 4.1, 4.5, 4.9), (4, "graded 6"): (0.3, 2.0, 3.3, 3.6, 4.6),
}  # fmt: skip
"""Studies in % that call an arm equivalent whose gap is the margin, the worst arm."""


@pytest.mark.parametrize(("arms", "name"), EQUIVALENT)
def test_whole_runs_call_an_arm_at_the_margin_equivalent_as_rarely_as_stated(arms, name):
    for seeds, stated in zip(SEEDS, EQUIVALENT[arms, name], strict=True):
        assert at_most(runs(name, arms, seeds)[2], stated / 100)


@pytest.mark.parametrize(("arms", "stated"), [(2, 0.047), (4, 0.048), (7, 0.045)])
def test_whole_runs_without_a_null_arm(arms, stated):
    for name in ("equal", "loud arm 6", "loud baseline 6", "shared arms"):
        for seeds in SEEDS:
            claimed, worse, within = runs(name, arms, seeds, controls=1)
            assert at_most(claimed, stated) and at_most(worse, 0.025) and at_most(within, 0.054)


@pytest.mark.parametrize(("arms", "stated"), [(1, 0.053), (2, 0.038), (4, 0.038), (7, 0.041)])
def test_looks_after_every_seed_claim_as_rarely_as_stated(arms, stated):
    for name in ("equal", "t5", "loud arm 6", "loud baseline 6", "graded 6", "star", "shared arms"):
        claimed, worse, within = runs(name, arms, 8, maximum=8)
        assert at_most(claimed, stated), f"{name}: {claimed:.2%}"
        assert at_most(worse, 0.027) and at_most(within, 0.052)


def forked(arms: int, trunks: int, points: int, share: float) -> np.ndarray:
    """Gaps [STUDIES, arms, trunks, points] without any true gap on average over the trunks, of which `share` of the
    variance is the trunk's. Arms' sds are 1 to 6, their trunks correlate by a half, and points differ truly."""
    rng = np.random.default_rng([arms, trunks, points, int(10 * share)])
    common, own = (rng.normal(size=(STUDIES, each, trunks, 1)) for each in (1, arms))
    inner = rng.normal(size=(STUDIES, arms, trunks, points))
    gaps = np.sqrt(share) * np.sqrt(0.5) * (common + own) + np.sqrt(1 - share) * inner
    slope = np.arange(points) - (points - 1) / 2
    return np.linspace(1, 6, arms)[:, None, None] * gaps + 3 * slope


def fork_rates(arms: int, trunks: int, points: int, share: float, maximum: int | None = None) -> tuple[float, ...]:
    gaps, design = forked(arms, trunks, points, share), Forks(arms=arms, maximum=maximum)
    worse, better, _ = flags(partial(judging.fit_forks, gaps), design, trunks, FAR)
    *_, within = flags(partial(judging.fit_forks, gaps + FAR), design, trunks, FAR)
    return (worse | better).any(-1).mean(), worse.any(-1).mean(), within.mean(0).max()


@pytest.mark.parametrize("arms", [1, 4, 7])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_forks_in_trunks_claim_as_rarely_as_stated(arms, share):
    for trunks in (3, 4, 8):
        for points in (1, 3):
            claimed, worse, within = fork_rates(arms, trunks, points, share)
            assert at_most(claimed, 0.05) and at_most(worse, 0.025) and at_most(within, 0.05)
    assert fork_rates(arms, 2, 3, share) == (0, 0, 0)  # two trunks give no verdict


@pytest.mark.parametrize("arms", [1, 4, 7])
def test_looks_after_every_trunk_claim_as_rarely_as_stated(arms):
    for share in (0.0, 0.8):
        claimed, worse, within = fork_rates(arms, 8, 3, share, maximum=8)
        assert at_most(claimed, 0.053) and at_most(worse, 0.027) and at_most(within, 0.052)


OWN_TRUNKS = {1: (3,), 4: (8, 5, 3, 3), 7: (8, 8, 6, 4, 3, 3, 3)}
"""Arms -> the trunks of each, of a study that runs."""


def own_rates(arms: int, share: float, maximum: int | None = None, *, together: bool = True) -> tuple[float, ...]:
    """fork_rates where each arm has its own number of trunks, the first of which all share. `together`: at the level
    of all arms; else each arm at the level of the arms that got their trunks before it."""
    claims = []
    for i, trunks in enumerate(OWN_TRUNKS[arms]):
        gaps = forked(arms, 8, 3, share)[:, i : i + 1]
        design = Forks(arms=arms if together else i + 1, maximum=maximum)
        worse, better, _ = flags(partial(judging.fit_forks, gaps), design, trunks, FAR)
        *_, within = flags(partial(judging.fit_forks, gaps + FAR), design, trunks, FAR)
        claims.append((worse | better, worse, within))
    claimed, worse, within = (np.concatenate(each, axis=-1) for each in zip(*claims, strict=True))
    return claimed.any(-1).mean(), worse.any(-1).mean(), within.mean(0).max()


@pytest.mark.parametrize("arms", OWN_TRUNKS)
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_arms_with_trunks_of_their_own_number_claim_as_rarely_as_stated(arms, share):
    claimed, worse, within = own_rates(arms, share)
    assert at_most(claimed, 0.05) and at_most(worse, 0.025) and at_most(within, 0.05)
    claimed, worse, within = own_rates(arms, share, maximum=8)
    assert at_most(claimed, 0.05) and at_most(worse, 0.025) and at_most(within, 0.05)


def test_a_level_that_moves_while_a_study_runs_does_fail():
    assert not at_most(own_rates(7, 0.0, together=False)[0], 0.05)


def test_whole_runs_leave_room_for_arms_that_wait():
    """Two arms of four are judged: as rarely wrong as two arms by themselves, and more rarely."""
    for name in ("equal", "loud arm 6", "loud arms 6", "shared arms"):
        for seeds, stated in zip(SEEDS, FAMILY[2, name], strict=True):
            losses = noise(name, 2, seeds)
            worse, better, _ = flags(
                partial(judging.fit_whole_runs, losses, 2), WholeRuns(arms=2, controls=2, waiting=2), seeds, FAR
            )
            assert at_most((worse | better).any(-1).mean(), stated / 100)
            assert (worse | better).any(-1).mean() <= runs(name, 2, seeds)[0]


def test_power_is_that_of_the_table():
    """One arm of four with a gap, the others without: % of studies that find it, at gaps of 1, 2, 3 and 5 sd."""
    for seeds, stated in {3: (6, 45, 86, 100), 5: (27, 92, 100, 100)}.items():
        for gap, percent in zip((1, 2, 3, 5), stated, strict=True):
            losses = noise("equal", 4, seeds)
            losses[:, 2] += gap * np.sqrt(2)  # in sds of the gap between two runs
            worse, *_ = flags(partial(judging.fit_whole_runs, losses, 2), WholeRuns(arms=4, controls=2), seeds, FAR)
            assert worse[:, 0].mean() == pytest.approx(percent / 100, abs=0.04)


def test_pooled_variances_without_a_guard_do_fail():
    rates = []
    for seeds in SEEDS:
        losses = noise("loud baseline 6", 7, seeds, controls=1)
        residual = losses - losses.mean(-1, keepdims=True) - losses.mean(-2, keepdims=True)
        residual += losses.mean((-1, -2), keepdims=True)
        error = np.sqrt(2 * (residual**2).sum((-1, -2)) / (7 * (seeds - 1)) / seeds)
        gap = np.abs((losses[:, 1:] - losses[:, :1]).mean(-1)).max(-1)
        rates.append(np.mean(gap / error > critical_of_largest(0.05, 7, 0.5, float(7 * (seeds - 1)))))
    assert max(rates) > 0.15 and not at_most(max(rates), 0.05)


def test_forks_as_replicates_do_fail():
    gaps = forked(1, 2, 4, 0.8) - 3 * (np.arange(4) - 1.5)
    p = stats.ttest_1samp(gaps.reshape(STUDIES, -1), 0, axis=1).pvalue
    assert np.mean(p < 0.05) > 0.3 and not at_most(np.mean(p < 0.05), 0.05)


def test_looks_without_correction_do_fail():
    gaps = forked(1, 8, 1, 0.0)[:, 0, :, 0]
    looks = [stats.ttest_1samp(gaps[:, :n], 0, axis=1).pvalue < 0.05 for n in range(2, 9)]
    assert np.any(looks, axis=0).mean() > 0.14 and not at_most(np.any(looks, axis=0).mean(), 0.05)


def settling(arms: int, maximum: int, margin: float, *, gap: float = 0.0, looks: bool = True) -> tuple[float, ...]:
    """Studies that go on until the interval of every arm reaches no further than `margin` sds of the loudest arm:
    shares that stop before `maximum`; whose intervals at the stop miss the true gap in any arm; that claim one; and,
    most over arms, that call an arm equivalent. `looks`: at the levels of looks; else each look as if it were alone.

    The gaps are those of whole runs of 480 steps by forks of 120 and 320 steps that end together.
    """
    noise = forked(arms, maximum, 2, 0.5) - 3 * np.array([-0.5, 0.5])  # without the true difference of the points
    values = (np.sqrt([120, 320]) * noise) @ weights([120, 320], 480).whole
    loudest = values[:, -1].std()
    values, margin = values + gap * loudest, margin * loudest
    design = Forks(arms=arms, maximum=maximum if looks else None)
    running = np.ones(STUDIES, dtype=bool)
    missed = claimed = within = np.zeros((STUDIES, arms), dtype=bool)
    for n in range(design.first, maximum + 1):
        mean, error = values[..., :n].mean(-1), values[..., :n].std(-1, ddof=1) / np.sqrt(n)
        half, near = design.critical(n) * error, design.equivalence(n) * error
        last = running & ((half <= margin).all(-1) | (n == maximum))
        missed = missed | (last[:, None] & (np.abs(mean - gap * loudest) > half))
        claimed = claimed | (running[:, None] & (np.abs(mean) > half))
        within = within | (running[:, None] & (np.abs(mean) + near < margin))
        running = running & ~last
        early = 1 - last.mean() if n == maximum else 0
    return early, missed.any(-1).mean(), claimed.any(-1).mean(), within.mean(0).max()


@pytest.mark.parametrize("arms", [1, 4])
@pytest.mark.parametrize("maximum", [8, 16])
def test_studies_that_stop_when_gaps_are_known_to_the_margin_err_as_rarely_as_stated(arms, maximum):
    stops = []
    for margin in (0.5, 1, 2):
        early, missed, claimed, _ = settling(arms, maximum, margin)
        assert at_most(missed, 0.05) and at_most(claimed, 0.05), f"margin {margin} sds: {missed:.2%}, {claimed:.2%}"
        assert at_most(settling(arms, maximum, margin, gap=margin)[3], 0.05)
        stops.append(early)
    assert stops == sorted(stops) and stops[-1] > 0.7


def test_stopping_at_the_margin_without_levels_of_looks_does_fail():
    assert not at_most(settling(1, 16, 0.5, looks=False)[1], 0.05)
    assert not at_most(settling(1, 16, 0.5, looks=False)[2], 0.05)
