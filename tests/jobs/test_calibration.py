"""The calibrate job: its theory agrees with quadrature, closed forms and others' numbers, and faults are found."""

import math

import numpy as np
import pytest
import torch

from hqsweep.config.job import parse as parse_config
from hqsweep.errors import UserError
from hqsweep.formats import parse, spellings
from hqsweep.jobs import calibration
from hqsweep.jobs.calibration import EMULATED, draw, published_db, sqnr_rows
from hqsweep.jobs.sink import ListSink
from hqsweep.jobs.sqnr_theory import DENSITIES, theoretical_sqnr_db
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import LinearQuantizers

SHAPE = (512, 4096)


@pytest.mark.parametrize("name", DENSITIES)
def test_partial_moments_are_those_of_draws_below_a_bound(name):
    x = draw(name, 1000, 1000, 0).abs().double()
    for bound in (0.3, 1.7):
        moments = DENSITIES[name].moments(np.array([bound]))
        inside = torch.where(x <= bound, 1.0, 0.0).double()
        for n, moment in enumerate(moments):
            assert (inside * x**n).mean().item() == pytest.approx(moment.item(), rel=0.01)
    tail = (x > float(DENSITIES[name].quantile(np.array([0.01]))[0])).double().mean().item()
    assert tail == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("text", "mantissa"), [("bf16", 7), ("fp8_current", 3), ("fp8_current+e5m2", 2)])
def test_theory_is_the_formula_of_floating_point_in_range(text, mantissa):
    """step^2 / 12 with the phase of the scale averaged: 6.02 m + 13.46 dB, whatever the density."""
    for name in ("normal", "laplace", "t5"):
        expected = 20 * mantissa * math.log10(2) + 10 * math.log10(12 * math.log(4) / 0.75)
        assert theoretical_sqnr_db(parse(text), name, *SHAPE) == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize(("text", "name"), [key for key in EMULATED if key[1] in ("normal", "laplace")])
def test_theory_agrees_with_an_independent_emulation(text, name):
    """No quantizer takes part: the integral against numbers measured elsewhere."""
    theory, (mean, deviation) = theoretical_sqnr_db(parse(text), name, *SHAPE), EMULATED[text, name]
    assert theory is None or theory == pytest.approx(mean, abs=0.1 + 3 * deviation)


def test_theory_agrees_with_published_errors():
    for text in ("nvfp4", "nvfp4+2d"):
        assert theoretical_sqnr_db(parse(text), "normal", *SHAPE) == pytest.approx(
            published_db(text, "normal"), abs=0.05
        )


@pytest.mark.parametrize("text", spellings("nvfp4+tensor"))
def test_one_scale_for_all_has_the_error_of_theory_under_the_amax_that_was_drawn(text):
    rows = list(sqnr_rows([text], "normal", (512, 4096), 0, torch.device("cpu")))
    assert [(row["source"], row["status"]) for row in rows] == [("theory", "PASS")]
    typical = theoretical_sqnr_db(parse(text), "normal", 512, 4096)
    assert "pow2" in text or abs(typical - rows[0]["measured_db"]) > 0.05  # so a typical amax would not do


def config(**section):
    defaults = {"formats": ["mxfp8", "nvfp4"], "distributions": ["normal", "token_scale_2"], "shape": [256, 2048],
             "students": {"mxfp4": "mxfp4"}, "steps": 500, "device": "cpu"}  # fmt: skip
    return parse_config({"job": "calibrate", "sweep": "calibrate", "calibrate": defaults | section})


def run(tmp_path, **section):
    sink = ListSink()
    calibration.run(config(**section), sink, tmp_path)
    return sink.tables["calibrate"]


def test_every_check_passes(tmp_path):
    rows = run(tmp_path)
    assert [row["note"] for row in rows if row["status"] != "PASS"] == []
    assert {row["check"] for row in rows} == {"sqnr", "row median", "gemm", "teacher"}
    assert {row["source"] for row in rows} == {"theory", "published", "emulated", "predicted"}
    assert all(row["row_sqnr_db_p5"] < row["row_sqnr_db_median"] for row in rows if row["check"] == "sqnr")


def test_what_nobody_predicts_is_shown_and_not_judged():
    rows = list(sqnr_rows(["mxfp6_e2m3"], "outlier_channels", (32, 256), 0, torch.device("cpu")))
    assert [(row["status"], row["source"]) for row in rows] == [("SKIP", None)] and rows[0]["measured_db"] > 20


def test_rows_that_share_a_scale_lose_the_small_ones_which_the_whole_does_not_show():
    (whole, median) = [row for row in sqnr_rows(["nvfp4+2d"], "token_scale_2", (512, 1024), 0, torch.device("cpu"))]
    assert whole["measured_db"] > 15 and median["measured_db"] < 1 and whole["underflow_pct"] > 60


def test_the_product_of_wrong_operands_is_found(monkeypatch):
    """Columnwise operands in the rowwise format: y stays right, both gradients do not."""
    right = HybridQuantizer.quantize
    section = LinearQuantizers.parse("mxfp8|mxfp4", "s").texts()

    def status():
        rows = calibration.gemm_rows("s", section, 0, torch.device("cpu"))
        return {row["case"]: row["status"] for row in rows}

    assert set(status().values()) == {"PASS"}
    wrong = lambda self, x, **options: right(HybridQuantizer(self.rowwise, self.rowwise), x, **options)  # noqa: E731
    monkeypatch.setattr(HybridQuantizer, "quantize", wrong)
    assert status() == {"y": "PASS", "dx": "FAIL", "dw": "FAIL"}


def test_a_student_on_coarser_operands_is_found(monkeypatch):
    right = HybridQuantizer.quantize
    coarse = HybridQuantizer.parse("mxfp4")
    monkeypatch.setattr(HybridQuantizer, "quantize", lambda self, x, **options: right(coarse, x, **options))
    section = LinearQuantizers.parse("nvfp4", "s").texts()
    row = calibration.teacher_row("s", section, 300, 0, torch.device("cpu"))
    assert row["status"] == "FAIL" and "which allows" in row["note"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"formats": ["mxfp9"]}, "calibrate.formats: format 'mxfp9': unknown name 'mxfp9' .did you mean 'mxfp8'"),
        ({"distributions": ["t4"]}, "calibrate.distributions: got 't4' .did you mean 't5'"),
        ({"students": {"a": "mxfp9"}}, "calibrate.students.a: format 'mxfp9'"),
        ({"students": {"a": "fp8_delayed"}}, "calibrate.students.a: fp8_delayed has no error of its own"),
    ],
)
def test_wrong_sections(section, message):
    with pytest.raises(UserError, match=message):
        config(**section)
