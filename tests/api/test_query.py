"""hqsweep.query: the answers of the command as DataFrames."""

from pathlib import Path

import pandas as pd
import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import three_arms, write_sweep


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sweep(tmp_path / "study", three_arms())
    return tmp_path


def test_an_answer_is_the_frame_that_pandas_makes_of_the_rows(folder: Path) -> None:
    answer = hq.query("arm, seed, min(val_loss) as low where step > 100", "study", runs_dir=folder)
    sweep = hq.Sweep(folder / "study")
    late = sweep.metrics.query("metric == 'val_loss' and step > 100")
    low = late.groupby(["arm", "seed"])["value"].min().rename("low").reset_index()
    pd.testing.assert_frame_equal(answer, low, check_dtype=False)
    assert answer.attrs == {"left_out": []}
    pd.testing.assert_frame_equal(hq.query("arm from runs", sweep), hq.query("arm from runs", runs_dir=folder))


def test_runs_that_are_left_out_are_named(folder: Path) -> None:
    run = RunStore(folder).runs("study")[0]
    run.jsonl("metrics").write_text("")
    (entry,) = hq.query("run from runs", runs_dir=folder).attrs["left_out"]
    assert entry["run"] == f"study/{run.name}" and entry["state"] == "damaged"


@pytest.mark.parametrize(
    ("question", "words", "says"),
    [("arm, los", (), "no column 'los'"), (None, (), "takes a text of SQL, not NoneType"),
     ("arm", (3,), "query: takes names, folders, sweeps and runs, not int"), ("arm", ("x",), "is no run or")],
)  # fmt: skip
def test_wrong_input_is_a_sentence(folder: Path, question: str, words: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        hq.query(question, *words, runs_dir=folder)
