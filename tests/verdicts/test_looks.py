"""Looks at a growing study: which level they have, which flags stay, and what an estimate says at the last one."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from hqsweep.errors import UserError
from hqsweep.verdicts import designs, judging
from hqsweep.verdicts.designs import Forks
from hqsweep.verdicts.judging import flags

FALLING = [1.0, 1.01, 1.02, 9.0, -9.0, 8.0]


def test_intervals_have_the_level_of_the_last_look():
    gaps = [[0.3], [0.5], [0.2], [0.6]]
    fixed, growing = (judging.judge_forks({"a": gaps, "b": gaps}, margin=1.0, maximum=most)["a"] for most in (None, 8))
    single = designs.two_sided(0.05 / 2, 4, 8)
    assert growing.ci_high - growing.gap == pytest.approx(stats.t.isf(single / 2, 3) * growing.se)
    assert growing.eq_high - growing.gap == pytest.approx(stats.t.isf(designs.one_sided(0.05, 4, 8), 3) * growing.se)
    assert fixed.ci_high < growing.ci_high and fixed.p == growing.p


def test_whole_runs_are_looked_at_from_two_seeds_on_at_the_joint_level():
    losses = {"bf16": [2.0, 2.1], "a": [4.0, 4.1001], "b": [2.01, 2.1]}
    verdicts = judging.judge_whole_runs(losses, baseline="bf16", margin=0.1, maximum=16)
    assert verdicts["a"].worse and not verdicts["b"].worse and verdicts["a"].p < designs.two_sided(0.05, 2, 16)


def test_a_flag_stays_and_the_other_may_join_it():
    fit, design = partial(judging.fit_forks, np.array([FALLING])[..., None]), Forks(arms=1, maximum=8)
    assert [bool(flags(fit, design, n, 2.0)[0][0]) for n in (2, 3, 4, 6)] == [False, True, True, True]
    assert not flags(fit, Forks(arms=1), 6, 2.0)[0][0] and flags(fit, design, 6, 2.0)[2][0]
    verdict = judging.judge_forks({"a": [[gap] for gap in FALLING]}, margin=2.0, maximum=8)["a"]
    assert verdict.verdict == "worse" and verdict.ci_low < 0 and np.isnan(verdict.needed)


def test_of_worse_and_better_the_first_stays():
    later = -40 - np.arange(12) / 100
    gaps = np.array([[1.0, 1.01, 1.02, *later]])[..., None]
    worse, better, _ = flags(partial(judging.fit_forks, gaps), Forks(arms=1, maximum=15), 15, 2.0)
    assert worse[0] and not better[0]
    assert flags(partial(judging.fit_forks, gaps[:, 3:]), Forks(arms=1, maximum=15), 12, 2.0)[1][0]


def test_more_replicates_than_stated_are_refused():
    with pytest.raises(UserError, match=r"seeds\.max: 5, and 6 replicates are there; the largest number is stated"):
        judging.judge_forks({"a": [[gap] for gap in FALLING]}, margin=2.0, maximum=5)
