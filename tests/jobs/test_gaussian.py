"""Gaps by the formats' errors on Gaussian numbers."""

import math

import pytest

from hqsweep.formats import parse
from hqsweep.jobs.gaussian import expected_gaps, gaussian_error
from hqsweep.jobs.sqnr_theory import theoretical_sqnr_db


def of(text: str) -> float:
    return gaussian_error({"linear": dict.fromkeys(("input", "weight", "grad_output"), text)})


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4", "fp8_block"])
def test_an_error_is_twice_what_theory_says_of_an_operand(text):
    power = 10 ** (-theoretical_sqnr_db(parse(text), "normal", 512, 512) / 10)
    assert of(text) == pytest.approx(2 * power, rel=0.02)


def test_directions_sources_and_options_count():
    assert of("bf16") < 1e-4 < of("mxfp8") < of("nvfp4") < of("mxfp4") < of("mxfp4+sr")
    assert of("nvfp4+rht") == of("nvfp4") and of("fp8_delayed") == of("fp8_current")
    assert of("mxfp8") < of("nvfp4|mxfp8") < of("nvfp4|mxfp8@rowwise_dequantized")


def test_other_recipes_have_none():
    assert gaussian_error(None) is gaussian_error({"qfactory": "a.b", "linear": None}) is None
    assert gaussian_error({"linear": {"input": "mxfp99"}}) is None


def test_a_gap_is_predicted_by_the_other_arms():
    errors = {"a": 0.01, "b": 0.02, "c": 0.04, "python": None}
    expected = expected_gaps({"a": 0.1, "b": 0.2, "c": 2.0, "python": 1.0}, errors)
    assert expected["c"] == pytest.approx(0.4) and math.isnan(expected["python"])
    assert math.isnan(expected_gaps({"a": 0.1}, errors)["a"])
