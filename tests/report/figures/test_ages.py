"""The figure of forks that end together: every fork, and the line from age 0 to a whole run."""

import numpy as np
import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.ages import age_lines, age_panels


@pytest.fixture
def comparison(make_sweep, fake):
    def grows(seed, point):
        return 0.02 * (1 + 0.01 * (120 - point)) + 0.0005 * seed

    return compare(make_sweep(fake.fork_study({"nvfp4": grows}, end=120)), "bf16")


def test_the_line_ends_at_the_verdicts_gap_and_its_interval(comparison):
    rows, row = age_lines(comparison), comparison.arms.set_index("arm").loc["nvfp4"]
    line = rows[rows["kind"] == "line"].set_index("step")
    assert tuple(line.loc[120, ["gap_pct", "low", "high"]]) == pytest.approx(
        (row["gap_pct"], row["ci_low_pct"], row["ci_high_pct"])
    )
    assert line.loc[0, "gap_pct"] == pytest.approx(row["at_once_pct"])
    forks = rows[rows["kind"] == "fork"]
    assert sorted(set(forks["step"])) == [40, 80] and len(forks) == 8
    assert np.interp(80, line.index, line["gap_pct"]) == pytest.approx(forks[forks["step"] == 80]["gap_pct"].mean())


def test_the_panel_says_the_gap_of_a_whole_run(comparison):
    (panel,) = age_panels(comparison)
    assert panel.says.endswith("At the age of a whole run: nvfp4 +2.238 %.") and "end at step 120" in panel.heading
    assert [trace.mode for trace in panel.figure.data][-1] == "markers"


def test_forks_of_one_length_have_none(make_sweep, fake):
    assert age_panels(compare(make_sweep(fake.fork_study({"nvfp4": 0.01})), "bf16")) == []
