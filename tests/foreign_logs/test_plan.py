"""Plans by logs: the counts are those of verdicts.plan for the noise of the logs."""

import math

import numpy as np
import pandas as pd
import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, read_sources
from hqsweep.foreign_logs.plan import document, plan
from hqsweep.foreign_logs.tables import Frame
from hqsweep.verdicts import judging
from hqsweep.verdicts import plan as power
from tests.foreign_logs.conftest import finals


def planned(frame, size, **question):
    log = read_sources([Frame(frame)], Question(**{"metric": ""} | question), Reading(columns={}))
    return plan(log, size)


def test_counts_are_those_of_the_noise_of_a_gap(rows):
    by_logs = planned(rows, "0.05%")
    values = {arm: 100 * np.array(own) / np.mean(finals(rows)["bf16"]) for arm, own in finals(rows).items()}
    for row in by_logs.rows:
        estimate = judging.judge_whole_runs(values, baseline="bf16", margin=1)[row.arm]
        assert row.sd == pytest.approx(2 * estimate.se, rel=1e-9)
        assert row.find == power.replicates("whole runs", row.sd, 2, gap=0.05, null=False)
        assert row.equal == power.replicates("whole runs", row.sd, 2, margin=0.05, null=False)
    assert f"{max(max(row.find, row.equal) for row in by_logs.rows):.0f} seeds decide 0.05 %" in by_logs.sentence


def test_a_smaller_gap_takes_more_seeds_and_one_may_be_out_of_reach(rows):
    counts = [planned(rows, size).rows[0].find for size in (0.01, 0.001, 1e-7)]
    assert counts[0] < counts[1] and math.isinf(counts[2])
    assert "no number of seeds up to 1000" in planned(rows, 1e-7).sentence


def test_the_baseline_alone_shows_the_noise_of_single_runs():
    frame = pd.DataFrame({"arm": "base", "seed": range(4), "score": [1.0, 1.1, 0.9, 1.2]})
    by_logs = planned(frame, 0.1)
    assert by_logs.rows[0].sd == pytest.approx(math.sqrt(2) * frame["score"].std(), rel=1e-12)
    assert by_logs.rows[0].find == power.replicates("whole runs", by_logs.rows[0].sd, 1, gap=0.1, null=False)
    assert document(by_logs)["arms"] == 1 and "only arm" in by_logs.notes[-1]


def test_one_seed_shows_no_noise():
    frame = pd.DataFrame({"arm": ["bf16", "a"], "seed": 0, "loss": [1.0, 1.1]})
    assert "two seeds of an arm at least" in planned(frame, "1%").sentence
    assert "two seeds of an arm at least" in planned(frame[:1], "1%").sentence


def test_a_name_without_a_direction_is_no_fault_and_a_wrong_size_is(rows):
    frame = rows.rename(columns={"val_loss": "x"})
    assert set(planned(frame, 0.01).rows) == set(planned(frame, 0.01, lower=False).rows)
    with pytest.raises(UserError, match="--resolve: got '0'; it takes"):
        planned(frame, "0")
