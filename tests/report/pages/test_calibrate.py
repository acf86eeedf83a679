"""The tables of the calibrate job."""

from rich.console import Console

from hqsweep.jobs.calibrate.sqnr import Expectation, calibration_row
from hqsweep.report.pages.calibrate import tables


def shown(*rows):
    console = Console(width=140, record=True)
    console.print(tables(rows))
    return console.export_text()


def test_tables_give_measured_numbers_distances_quantiles_and_failures():
    statistics = {"row_sqnr_db_median": 31.5, "row_sqnr_db_p5": 31.2, "underflow_pct": 0.0}
    good, bad = (Expectation.around(source, 31.5, 0.1) for source in ("theory", "emulated"))
    page = shown(
        calibration_row("sqnr", "mxfp8", "normal", 31.52, good, statistics),
        calibration_row("sqnr", "nvfp4", "normal", 30.0, bad, statistics),
        calibration_row("sqnr", "mxfp6_e2m3", "normal", 29.0, None, statistics),
        calibration_row("teacher", "fp32", "loss floor", 108.0,
                        Expectation(source="predicted", expected_db=float("inf"), low_db=100, high_db=float("inf"))),
    )  # fmt: skip
    assert "less theory" in page and "+0.02" in page and "-1.50 !" in page and "31.5 / 31.2" in page
    assert "100.00 to inf" in page and "FAIL sqnr nvfp4 normal: measured 30.00 dB; emulated 31.50 dB" in page
    assert "calibrate: 2 passed, 1 failed, 1 with nothing to compare with" in page
