"""The SQNR that other formats would have had on the tensors of a training."""

import json
from pathlib import Path
from statistics import median

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.heatmaps import OWN, what_if_heatmaps, what_if_rows
from hqsweep.report.pages.folder import write
from hqsweep.sweep.store.store import runs_in
from tests.report.conftest import three_arms, write_sweep


@pytest.fixture
def comparison(tmp_path: Path):
    """Three arms; the sampled tensors of the arm mxfp8 also in two other formats."""
    write_sweep(tmp_path / "study", three_arms())
    runs = runs_in(tmp_path / "study")
    for run in runs:
        if run.manifest()["arm"] == "mxfp8":
            rows = [row for row in run.rows("stats") if row["direction"] != "output"]
            others = [
                row | {"format": name, "sqnr_db": row["sqnr_db"] + gain}
                for name, gain in {"nvfp4": -6.0, "mxfp6_e3m2": 3.0}.items()
                for row in rows
            ]
            run.write_status(state="pending")
            run.jsonl("what_if").write_text("".join(json.dumps(row) + "\n" for row in others))
            run.write_status(state="finished")
    return compare(runs, "bf16")


def test_rows_are_medians_beside_the_own_format(comparison) -> None:
    rows = what_if_rows(comparison)
    assert set(rows["arm"]) == {"mxfp8"} and set(rows["own"]) == {"mxfp8"}
    slot = rows[(rows["tensor"] == "input") & (rows["direction"] == "rowwise")].set_index("format")["sqnr_db"]
    stats = comparison.frames.stats
    is_slot = (stats["arm"] == "mxfp8") & (stats["tensor"] == "input") & (stats["direction"] == "rowwise")
    own = median(stats[is_slot]["sqnr_db"])
    assert slot.to_dict() == pytest.approx({"mxfp8": own, "nvfp4": own - 6, "mxfp6_e3m2": own + 3})


def test_an_arm_has_a_column_for_each_format_and_its_own_comes_first(comparison, tmp_path) -> None:
    (panel,) = what_if_heatmaps(comparison)
    (trace,) = panel.figure.data
    assert panel.heading == "mxfp8" and next(iter(trace.x)) == OWN and len(trace.x) == 3
    assert "mxfp6_e3m2" in panel.says
    page = write(comparison, tmp_path / "out").read_text()
    assert "Quantization error in other formats" in page
    assert (tmp_path / "out/figures/what_if.svg").is_file() and (tmp_path / "out/figures/what_if.csv").is_file()


def test_arms_without_other_formats_have_no_figure(tmp_path) -> None:
    write_sweep(tmp_path / "study", three_arms())
    assert not list(what_if_heatmaps(compare(runs_in(tmp_path / "study"), "bf16")))
