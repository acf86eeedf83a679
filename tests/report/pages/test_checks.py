"""The parity matrix, and the tables of the calibrate job."""

from rich.console import Console

from hqsweep.jobs.calibration import Expectation, calibration_row
from hqsweep.report.pages.checks import first_mismatch, matrix, summary, tables


def row(check, subject, status="PASS", case="normal 64x96", **more):
    return {"check": check, "case": case, "subject": subject, "status": status, "mismatches": 0, "total": 96,
            "first_index": None, "got": None, "expected": None, "note": None} | more  # fmt: skip


WRONG = row(
    "kernel", "nvfp4", "FAIL", case="normal 32x32", mismatches=3, first_index="[0, 17]", got="0x7e", expected="0x7f"
)
ROWS = [row("kernel", "mxfp8"), row("kernel", "mxfp8", case="outlier"), row("kernel", "nvfp4"), WRONG,
        row("vanilla", "mxfp8"), row("vanilla", "nvfp4", "SKIP", note="no kernel"),
        *(row("routing", f"{a}|{b}") for a in ("mxfp8", "nvfp4") for b in ("mxfp8", "nvfp4"))]  # fmt: skip


def shown(rows) -> str:
    console = Console(width=140, record=True)
    console.print(matrix(rows))
    return console.export_text()


def test_cells_count_cases_and_show_the_first_mismatch():
    page = shown(ROWS)
    line = next(line for line in page.splitlines() if "FAIL 1/2" in line)
    assert "nvfp4" in line and "at [0, 17]" in line and "skip" in line
    assert any("mxfp8" in line and "PASS 2" in line for line in page.splitlines())
    assert "FAIL kernel nvfp4 normal 32x32: 3 of 96 differ, first at [0, 17]: got 0x7e, expected 0x7f" in page


def test_pairs_make_a_square_of_their_own():
    page = shown([*ROWS, row("routing", "nvfp4|mxfp4", "FAIL", note="differs")])
    assert "nvfp4|mxfp8" not in page and "columns: 1 mxfp8, 2 nvfp4, 3 mxfp4; P pass" in page
    square = page[page.index("row | column") :].splitlines()
    cells = [line.strip("│").split("│") for line in square if line.startswith("│")]
    assert [[c.strip() for c in line] for line in cells] == [["mxfp8", "P", "P", "-"], ["nvfp4", "P", "P", "F"]]


def test_long_lists_of_failures_end_with_their_number():
    page = shown([WRONG] * 25)
    assert page.count("FAIL kernel nvfp4") == 20 and "and 5 more failures" in page


def test_first_mismatch_and_summary():
    assert first_mismatch(row("a", "b", "FAIL", note="shape differs")) == "shape differs"
    assert first_mismatch(row("a", "b", "FAIL")) == "FAIL"
    assert summary(ROWS) == "parity: 8 passed, 1 failed, 1 skipped"
    assert "parity: 0 passed" in shown([])


def shown_tables(*rows):
    console = Console(width=140, record=True)
    console.print(tables(rows))
    return console.export_text()


def test_tables_give_measured_numbers_distances_quantiles_and_failures():
    statistics = {"row_sqnr_db_median": 31.5, "row_sqnr_db_p5": 31.2, "underflow_pct": 0.0}
    good, bad = (Expectation.around(source, 31.5, 0.1) for source in ("theory", "emulated"))
    page = shown_tables(
        calibration_row("sqnr", "mxfp8", "normal", 31.52, good, statistics),
        calibration_row("sqnr", "nvfp4", "normal", 30.0, bad, statistics),
        calibration_row("sqnr", "mxfp6_e2m3", "normal", 29.0, None, statistics),
        calibration_row("teacher", "fp32", "loss floor", 108.0,
                        Expectation(source="predicted", expected_db=float("inf"), low_db=100, high_db=float("inf"))),
    )  # fmt: skip
    assert "less theory" in page and "+0.02" in page and "-1.50 !" in page and "31.5 / 31.2" in page
    assert "100.00 to inf" in page and "FAIL sqnr nvfp4 normal: measured 30.00 dB; emulated 31.50 dB" in page
    assert "calibrate: 2 passed, 1 failed, 1 with nothing to compare with" in page
