"""Simulated rates of wrong verdicts in a metric that is better the higher it is: those of STATED levels.

Each study has accuracies between 0.6 and 0.8 of a baseline and two arms over four seeds, whose level they share. The
bounds are the stated 5 % plus three standard errors of the number of studies.
"""

import math

import numpy as np
import pytest

from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, frame_of, judge_frame

STUDIES, SEEDS, SD, MARGIN = 300, 4, 0.004, 0.02
BOUND = 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def verdicts(gap: float, generator: np.random.Generator, margin: float | str = MARGIN) -> list[str]:
    """The verdicts on both arms of a study; the first arm's true gap is `gap`."""
    level = 0.7 + generator.normal(0, 0.03, SEEDS)
    values = {arm: level + own + generator.normal(0, SD, SEEDS) for arm, own in (("bf16", 0.0), ("a", gap), ("b", 0.0))}
    judgement = judge_frame(
        frame_of(values, "accuracy"), Question(metric="accuracy", margin=margin), Reading(columns={})
    )
    found = dict(zip(judgement.arms["arm"], judgement.arms["verdict"], strict=True))
    assert not judgement.lower
    return [found["a"], found["b"]]


@pytest.mark.parametrize("margin", [MARGIN, "2%"])
def test_without_a_gap_few_studies_claim_one(margin):
    generator = np.random.default_rng(7)
    claims = sum(bool({"worse", "better"} & set(verdicts(0.0, generator, margin))) for _ in range(STUDIES))
    assert claims / STUDIES <= BOUND


def test_a_gap_of_the_margin_is_rarely_equivalent():
    generator = np.random.default_rng(8)
    found = [verdicts(-MARGIN, generator)[0] for _ in range(STUDIES)]
    assert found.count("equivalent") / STUDIES <= BOUND and found.count("better") == 0


def test_a_large_gap_is_found_in_its_direction():
    generator = np.random.default_rng(9)
    assert [verdicts(sign * 0.05, generator)[0] for sign in (1, -1)] == ["better", "worse"]
