"""hqsweep.judge: dicts, DataFrames and paths give what the command line gives."""

import numpy as np
import pandas as pd
import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.verdicts import judging

ACCURACY = {"adam": [0.71, 0.73, 0.72], "muon": [0.74, 0.761, 0.75]}


def test_a_dict_of_arms():
    found = hq.judge(ACCURACY, baseline="adam", metric="accuracy", margin=0.005)
    expected = judging.judge_whole_runs(ACCURACY, baseline="adam", margin=0.005)["muon"]
    arm = found.verdicts.set_index("arm").loc["muon"]
    assert (arm["verdict"], arm["gap"], arm["p"], arm["n"]) == ("better", expected.gap, expected.p, 3)
    assert (found.baseline, found.unit, found.notes, found.left_out) == ("adam", "accuracy", (), ())
    assert found.values["muon"].tolist() == ACCURACY["muon"]
    assert repr(found).startswith("<Judgement accuracy (higher is better), 1 arm against adam, margin 0.005. muon: bet")
    again = hq.judge(
        {arm: pd.Series(np.array(own), index=list("abc")) for arm, own in ACCURACY.items()},
        baseline="adam", metric="accuracy", margin=0.005,
    )  # fmt: skip
    assert again.verdicts.equals(found.verdicts) and [key[0] for key in again.values.index] == ["a", "b", "c"]


def test_a_frame_and_a_path(tmp_path):
    rows = [(arm, seed, value) for arm, own in ACCURACY.items() for seed, value in enumerate(own)]
    frame = pd.DataFrame(rows, columns=["arm", "seed", "accuracy"])
    frame.to_csv(tmp_path / "a.csv", index=False)
    both = [hq.judge(data, baseline="adam", margin="1%") for data in (frame, str(tmp_path / "a.csv"))]
    assert both[0].verdicts.equals(both[1].verdicts) and both[0].unit == "% of the baseline's mean"


def test_hostile_names_are_text():
    name = "<script>\x1b[31m|`"
    shown = hq.judge({"bf16": [2.0, 2.1], name: [2.2, 2.3]}, metric="loss")._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (3, "judge: takes a dict, a DataFrame or the path of logs, not int"),
        ({"bf16": 2.0, "a": 2.1}, "judge: 'bf16' has a float; it takes the values of all seeds"),
        ({"bf16": ["high"], "a": [2.1]}, "'value' has a value that is no number"),
        ({"bf16": [2.1, 2.2], "a": [2.1, 2.3]}, r"metric 'value': .* \(in Python lower_is_better=True or False\)"),
        ({}, "no row has a value of 'value'"),
        (pd.DataFrame({"arm": ["a"]}), "no column 'val_loss'"),
        ("gone.csv", "gone.csv: no such file or folder"),
    ],
)
def test_wrong_data_gets_a_sentence(data, said):
    with pytest.raises(UserError, match=said):
        hq.judge(data)
