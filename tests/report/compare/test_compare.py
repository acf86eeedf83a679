"""compare and write: the files of a report folder hold all rows."""

import re

import pandas as pd
import pytest

from hqsweep.config.jobs import VERDICT_COLUMNS
from hqsweep.report.compare.compare import compare, document
from hqsweep.report.pages.folder import write


@pytest.mark.feature("F18")
def test_report_folder(make_sweep, fake, tmp_path):
    comparison = compare(make_sweep([*fake.three_arms(), fake.Run(arm="broken", state="failed", reason="x")]), "bf16")
    page = write(comparison, tmp_path / "reports" / "sweep")
    names = {"report.html", "report_light.html", "report.md", "compare.csv", "points.csv", "runs.csv",
             "metrics.parquet", "stats.parquet", "figures", "runs"}  # fmt: skip
    assert {path.name for path in page.parent.iterdir()} == names and page.name == "report.html"
    arms = pd.read_csv(page.parent / "compare.csv").set_index("arm")
    assert arms.at["nvfp4", "gap"] == comparison.arms.set_index("arm").at["nvfp4", "gap"]
    runs = pd.read_csv(page.parent / "runs.csv")
    assert len(runs) == 10 and runs["final_loss"].isna().sum() == 1 and "config.train.lr" in runs
    pd.testing.assert_frame_equal(pd.read_parquet(page.parent / "metrics.parquet"), comparison.frames.metrics)
    assert len(pd.read_parquet(page.parent / "stats.parquet")) == len(comparison.frames.stats)


@pytest.mark.slow
def test_every_figure_has_its_rows_as_csv(make_sweep, fake, tmp_path):
    arms = (("bf16", 0, 0), ("x", 0.03, 0), ("null", 0.001, 0.01))
    runs = [fake.Run(arm=arm, gap=gap, seed=seed, init_noise=noise) for arm, gap, noise in arms for seed in (0, 1)]
    comparison = compare(make_sweep([*runs, fake.Run(arm="broken", seed=4, state="failed", steps=50)]), "bf16")
    page = write(comparison, tmp_path / "out")
    files = {path.stem: pd.read_csv(path) for path in (page.parent / "figures").glob("*.csv")}
    assert set(re.findall(r'href="figures/(\w+)\.csv"', page.read_text())) == set(files)
    assert set(files) == {"forest", "val_loss_gap", "train_loss_gap", "val_loss", "train_loss", "quantization_error",
                          "gradient_cosine", "throughput"}  # fmt: skip
    losses = files["train_loss"]
    assert len(losses[losses["broken_seed"].isna()]) == 3 * fake.steps and (losses["broken_seed"] == 4).sum() == 50
    gaps, arms = files["forest"].set_index(["arm", "replicate"]), comparison.arms.set_index("arm")
    assert gaps.at[("x", "mean"), "gap_pct"] == pytest.approx(arms.at["x", "gap_pct"])
    single = comparison.points.set_index(["arm", "seed"]).at[("x", 1), "gap_pct"]
    assert gaps.at[("x", "seed 1"), "gap_pct"] == pytest.approx(single)
    assert list(files["throughput"].columns) == ["arm", "seed", "tokens_per_s"] and len(files["throughput"]) == 7
    errors = files["quantization_error"]
    assert len(errors) == 3 * 8 * 6 and {"sqnr_db", "underflow_pct"} <= set(errors)  # the broken run was not sampled


@pytest.mark.slow
def test_a_sweep_that_has_only_begun_still_makes_a_report(make_sweep, fake, tmp_path):
    runs = make_sweep([fake.Run(state="running", steps=7), fake.Run(arm="nvfp4"), fake.Run(arm="mxfp8")])
    for run in runs[1:]:
        fake.take_back(run)
    assert set(compare(runs[1:], "nvfp4").arms["state"]) == {"1 pending"}
    comparison = compare(runs, "bf16")
    assert comparison.arms["verdict"].tolist() == ["baseline", "unfinished", "unfinished"]
    assert "1 of 1 runs without a result" in write(comparison, tmp_path / "out").read_text()


@pytest.mark.slow
def test_the_markdown_page_shows_the_forest_plot_where_there_is_one(make_sweep, fake, tmp_path):
    page = write(compare(make_sweep(fake.three_arms()), "bf16"), tmp_path / "out")
    text, picture = (page.parent / name for name in ("report.md", "figures/forest.svg"))
    assert "](figures/forest.svg)" in text.read_text() and "mxfp8" in picture.read_text()
    alone = write(compare(make_sweep([fake.Run()], name="alone"), "bf16"), tmp_path / "alone")
    assert "forest" not in (alone.parent / "report.md").read_text()
    assert not (alone.parent / "figures" / "forest.svg").exists()


def test_rows_for_programs_hold_what_trackers_show(make_sweep, fake):
    rows = document(compare(make_sweep(fake.three_arms()), "bf16"))["arms"]
    assert len(rows) == 2 and all(set(VERDICT_COLUMNS) <= set(row) for row in rows)
