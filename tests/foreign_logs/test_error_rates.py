"""Simulated rates of wrong verdicts in a metric that is better the higher it is: those of STATED levels.

Each study has accuracies between 0.6 and 0.8 of a baseline and two arms over four seeds, whose level they share. The
bounds are the stated 5 % plus three standard errors of the number of studies. The verdicts of all studies come from the
arrays at once, and the first of them are shown to be the verdicts on logs.
"""

import math
from functools import partial

import numpy as np
import pytest

from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, frame_of, judge_frame
from hqsweep.verdicts.designs import WholeRuns
from hqsweep.verdicts.judging import fit_whole_runs, flags

ARMS = ("bf16", "a", "b")
STUDIES, SEEDS, SD, MARGIN = 3000, 4, 0.004, 0.02
BOUND = 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def accuracies(gap: float, seed: int) -> np.ndarray:
    """[STUDIES, arms, seeds]; the true gap of the first arm under test is `gap`."""
    generator = np.random.default_rng(seed)
    level = 0.7 + generator.normal(0, 0.03, (STUDIES, 1, SEEDS))
    return level + np.array([[0.0], [gap], [0.0]]) + generator.normal(0, SD, (STUDIES, 3, SEEDS))


def verdicts(values: np.ndarray, margin: float | str = MARGIN) -> np.ndarray:
    """The verdicts [studies, 2] on both arms of each study, of which judge_frame() gives the first 8."""
    relative = isinstance(margin, str)
    scale = 100 / np.abs(values[:, :1].mean(-1, keepdims=True)) if relative else 1
    size = float(margin.rstrip("%")) if relative else margin
    design = WholeRuns(arms=2, controls=1, maximum=None)
    worse, better, within = flags(partial(fit_whole_runs, -values * scale, 1), design, SEEDS, size)
    found = np.select([worse, better, within], ["worse", "better", "equivalent"], "undecided")
    for study, expected in zip(values[:8], found, strict=False):
        frame = frame_of(dict(zip(ARMS, study, strict=True)), "accuracy")
        judgement = judge_frame(frame, Question(metric="accuracy", margin=margin), Reading(columns={}))
        told = dict(zip(judgement.arms["arm"], judgement.arms["verdict"], strict=True))
        assert not judgement.lower
        assert [told["a"], told["b"]] == expected.tolist()
    return found


@pytest.mark.parametrize("margin", [MARGIN, "2%"])
def test_without_a_gap_few_studies_claim_one(margin):
    claims = np.isin(verdicts(accuracies(0.0, 7), margin), ("worse", "better")).any(1)
    assert claims.mean() <= BOUND


def test_a_gap_of_the_margin_is_rarely_equivalent():
    found = verdicts(accuracies(-MARGIN, 8))[:, 0]
    assert (found == "equivalent").mean() <= BOUND
    assert not (found == "better").any()


def test_a_large_gap_is_found_in_its_direction():
    for sign, expected in ((1, "better"), (-1, "worse")):
        assert (verdicts(accuracies(sign * 0.05, 9))[:, 0] == expected).all()
