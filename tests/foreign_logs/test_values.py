"""One value a run: windows, missing steps, doubled rows, runs of other lengths, and pieces of any size."""

import numpy as np
import pandas as pd
import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs import values
from hqsweep.foreign_logs.values import Collector, Columns

COLUMNS = Columns(arm="arm", seed="seed", step="step", trunk=None, point=None, metric="loss")


def rows(arm="a", replicate="0", steps=(100, 200, 300, 400), **changes) -> pd.DataFrame:
    frame = pd.DataFrame({"arm": arm, "replicate": replicate, "step": np.array(steps, float)})
    return frame.assign(value=frame["step"] / 100 + (arm == "b") + int(replicate) / 8, **changes)


def collected(*pieces: pd.DataFrame, window: float | None = None, columns: Columns = COLUMNS, any_length: bool = False):
    collector = Collector("log", columns, window)
    for piece in pieces:
        collector.add(piece)
    return collector.values(any_length)


def of_runs(found: values.Values) -> dict[tuple[str, str], float]:
    return {(run.arm, run.replicate): run.value for run in found.runs.itertuples()}


@pytest.mark.parametrize(("window", "mean"), [(None, 4.0), (1, 4.0), (200, 3.5), (0.5, 3.5), (1000, 2.5)])
def test_the_trailing_window(window, mean):
    found = collected(rows(), rows("b"), window=window)
    assert of_runs(found) == {("a", "0"): mean, ("b", "0"): mean + 1} and not found.left_out and not found.notes


@pytest.mark.parametrize("window", [None, 150, 0.4])
def test_pieces_of_any_size_and_order_give_the_same(window):
    whole = pd.concat([rows(arm, seed) for arm in "ab" for seed in "01"], ignore_index=True)
    shuffled = whole.sample(frac=1, random_state=3)
    parts = [shuffled.iloc[start : start + 3] for start in range(0, len(shuffled), 3)]
    assert of_runs(collected(*parts, window=window)) == of_runs(collected(whole, window=window))


def test_memory_is_bounded_by_the_window():
    collector = Collector("log", COLUMNS, 10)
    for start in range(0, 10_000, 1000):
        collector.add(rows(steps=range(start, start + 1000)))
        assert len(collector._kept) <= 10


def test_a_run_that_ends_early_is_left_out_by_name():
    pieces = [rows("a"), rows("a", "1"), rows("b"), rows("b", "1", steps=(100, 200))]
    found = collected(*pieces)
    assert set(of_runs(found)) == {("a", "0"), ("a", "1"), ("b", "0")}
    assert found.left_out == ("1 run that ends elsewhere than at step 400: 'b' 1 at 200.",)
    assert of_runs(collected(*pieces, any_length=True))["b", "1"] == 3.125


def test_steps_that_a_run_lacks_enter_no_mean():
    found = collected(rows("a"), rows("b", steps=(100, 200, 400)), window=1000)
    assert of_runs(found) == {("a", "0"): (1 + 2 + 4) / 3, ("b", "0"): (1 + 2 + 4) / 3 + 1}
    assert found.notes == ("Step 300 of the window is missing in some runs and enters no mean.",)


def test_doubled_rows():
    found = collected(rows("a"), rows("a").tail(1), rows("b"))
    assert of_runs(found)["a", "0"] == 4.0 and found.notes == ("1 row repeats another and counts once.",)
    with pytest.raises(UserError, match=r"seed 0 of 'a' has two values at step 400 \(4.0 and 5.0\); take one of them"):
        collected(rows("a"), rows("a", steps=(400,)).assign(value=5.0))
    without = Columns(arm="arm", seed="seed", step=None, trunk=None, point=None, metric="loss")
    with pytest.raises(UserError, match="seed 0 of 'a' has two rows and there is no column of steps"):
        collected(rows("a").head(2).assign(step=0.0), columns=without)


def test_a_run_that_is_not_finite_in_its_window_has_nan():
    broken = rows("b").assign(value=[1, 2, np.inf, 4])
    assert np.isnan(of_runs(collected(rows("a"), broken, window=200))["b", "0"])
    assert of_runs(collected(rows("a"), broken))["b", "0"] == 4.0


def test_rows_without_an_arm_or_seed_are_counted():
    found = collected(rows("a"), rows("b"), rows("b", replicate="1").assign(replicate=None), rows("b").assign(arm=""))
    assert found.left_out == ("5 rows without an arm or seed.",)


def test_too_many_runs_are_no_runs(monkeypatch):
    monkeypatch.setattr(values, "MOST_RUNS", 50)
    with pytest.raises(UserError, match=r"more than 50 runs by the columns 'arm', 'seed'; name others with"):
        collected(*(rows("a", str(seed)) for seed in range(60)))


def test_seeds_are_one_however_they_are_written():
    found = collected(rows("a", "1"), rows("b", "1").assign(replicate=1.0), rows("b", "2").assign(replicate=" 2 "))
    assert set(of_runs(found)) == {("a", "1"), ("b", "1"), ("b", "2")}
