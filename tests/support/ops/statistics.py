"""Equal statistics: rows of two ways to sum the same errors."""

import pytest

from hqsweep.config.jobs import PARTS


def assert_same_row(got, expected, rel=1e-5, abs=None):
    """`rel` and `abs` as in pytest.approx. scale_bias and the parts of an error are small differences of sums, so they
    may differ by 1e-5 of x, and by 0.1 % of the error."""
    assert got.keys() == expected.keys()
    assert got["scale_bias"] == pytest.approx(expected["scale_bias"], abs=1e-5, nan_ok=True)
    for name in PARTS[1:]:
        assert got[name] == pytest.approx(expected[name], abs=0.1, nan_ok=True), name
    for name in got.keys() - set(PARTS):
        near = abs if abs is not None or "_db" not in name else 5e-5  # so far sums may move decibels near 0
        assert got[name] == pytest.approx(expected[name], rel=rel, abs=near, nan_ok=True), name
