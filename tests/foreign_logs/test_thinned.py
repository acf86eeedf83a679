"""Curves keep the same steps in every run, however long the log is."""

import numpy as np
import pandas as pd

from hqsweep.foreign_logs.values import Curves, means

RUNS = pd.DataFrame({"arm": ["a", "a", "b"], "replicate": ["0", "1", "0"], "draw": ""})


def rows(run: int, steps: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"run": run, "step": steps.astype(float), "value": run + steps / 1e4})


def test_a_short_log_is_kept_whole():
    curves = Curves()
    for run in range(3):
        curves.add(rows(run, np.arange(5)))
    assert len(curves.rows(RUNS)) == 15 and curves.rows(RUNS).iloc[-1].tolist() == ["b", "0", "", 4.0, 2.0004]


def test_a_long_log_is_thinned_alike_in_all_runs_and_pieces():
    curves, steps = Curves(most=300), np.arange(49, 49 + 50 * 4000, 50)
    for piece in np.array_split(steps, 7):
        for run in range(3):
            curves.add(rows(run, piece))
    kept = curves.rows(RUNS)
    assert 30 <= len(kept) <= 300
    of_runs = kept.groupby(["arm", "replicate"])["step"].apply(set)
    assert of_runs.iloc[0] == of_runs.iloc[1] == of_runs.iloc[2] and 49 in of_runs.iloc[0]


def test_of_two_rows_of_a_step_the_later_one_is_kept():
    curves = Curves()
    curves.add(rows(0, np.array([1, 1])).assign(value=[5.0, 6.0]))
    assert curves.rows(RUNS)["value"].tolist() == [6.0]


def test_means_are_over_steps_that_all_runs_have():
    table = pd.DataFrame({"arm": "a", "step": [1, 1, 2, 3, 3], "value": [1.0, 3.0, 9.0, 2.0, np.inf]})
    only = means(table, ["a"])
    assert only[["step", "mean", "lowest", "highest", "runs"]].to_numpy().tolist() == [[1, 2, 1, 3, 2]]
