"""compare and write: the files of a report folder hold all rows."""

import pandas as pd

from hqsweep.report.compare import compare, write


def test_report_folder(make_sweep, fake, tmp_path):
    comparison = compare(make_sweep([*fake.three_arms(), fake.Run(arm="broken", state="failed", reason="x")]), "bf16")
    page = write(comparison, tmp_path / "reports" / "sweep")
    names = {"report.html", "report.md", "compare.csv", "runs.csv", "metrics.parquet", "stats.parquet"}
    assert {path.name for path in page.parent.iterdir()} == names and page.name == "report.html"
    arms = pd.read_csv(page.parent / "compare.csv").set_index("arm")
    assert arms.at["nvfp4", "gap"] == comparison.arms.set_index("arm").at["nvfp4", "gap"]
    runs = pd.read_csv(page.parent / "runs.csv")
    assert len(runs) == 10 and runs["final_loss"].isna().sum() == 1 and "config.train.lr" in runs
    pd.testing.assert_frame_equal(pd.read_parquet(page.parent / "metrics.parquet"), comparison.frames.metrics)
    assert len(pd.read_parquet(page.parent / "stats.parquet")) == len(comparison.frames.stats)


def test_a_sweep_that_has_only_begun_still_makes_a_report(make_sweep, fake, tmp_path):
    runs = make_sweep([fake.Run(state="running", steps=7), fake.Run(arm="nvfp4"), fake.Run(arm="mxfp8")])
    for run in runs[1:]:
        for name in ("metrics.jsonl", "stats.jsonl", "status.json"):
            (run.path / name).unlink()
    assert set(compare(runs[1:], "nvfp4").arms["state"]) == {"1 pending"}
    comparison = compare(runs, "bf16")
    assert set(comparison.arms["outcome"]) == {"failed"}
    assert "1 of 1 runs without a result" in write(comparison, tmp_path / "out").read_text()
