"""From values to pixels, and where ticks stand."""

import itertools
import math

import pytest

from hqsweep.report.figures.look import Axis, axis_of, even_ticks


def test_values_stand_between_the_ends_and_what_is_not_finite_nowhere():
    axis = axis_of({"range": [0, 10]}, [[1, 2]], 100, 200)
    assert axis.at([0, 5, 10]).tolist() == [100, 150, 200] and math.isnan(axis.at([math.nan])[0])
    assert axis.ticks() == [(100, "0"), (120, "2"), (140, "4"), (160, "6"), (180, "8"), (200, "10")]
    free = axis_of({}, [[1.0, math.nan], None, [2.0]], 0, 100)
    assert (free.low, free.high) == pytest.approx((0.98, 2.02))
    assert axis_of({"tickformat": "+.4~g", "range": [-1, 1]}, [], 0, 1).ticks()[-1][1] == "+1"


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(-4, -1, ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹"]), (-2.4, -1.6, ["0.005", "0.01", "0.02"]), (0.35, 0.36, ["2", "2"])],
)
def test_logarithmic_ticks_are_powers_or_few_and_never_none(low, high, labels):
    axis = Axis(start=0, end=100, low=low, high=high, log=True)
    ticks = axis.ticks()
    assert [label for _, label in ticks] == labels and all(-1e-9 <= place <= 100 + 1e-9 for place, _ in ticks)
    assert not math.isfinite(axis.at([0.0])[0])


def test_categories_stand_in_their_order_and_columns_each_for_itself():
    axis = axis_of({"autorange": "reversed", "categoryarray": ["a", "b"]}, [["b", "a"]], 100, 0)
    assert axis.at(["a", "b"]).tolist() == [25, 75] and [label for _, label in axis.ticks()] == ["a", "b"]
    columns = axis_of({}, [["row", "col", "row", "col"]], 0, 80, columns=True)
    assert [place for place, _ in columns.ticks()] == [10, 30, 50, 70]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.3, 2.7), (1e-6, 5e-6), (0, 20_775)])
def test_even_ticks_are_few_round_and_inside(low, high):
    ticks = even_ticks(low, high, 6)
    assert 3 <= len(ticks) <= 7 and low <= ticks[0] and ticks[-1] <= high
    assert {f"{b - a:.0e}"[0] for a, b in itertools.pairwise(ticks)} <= {"1", "2", "5"}
