"""The report of a judgement: every number of the verdict is on the page, and hostile names are text."""

import re

import pandas as pd
import pytest

from hqsweep.foreign_logs.folder import write
from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, judge_frame
from hqsweep.report.pages.folder import read_csv

HOSTILE = '<script>alert(1)</script>"\x1b[31m\u202e'


def report(frame, folder, margin="0.25%", **question):
    judgement = judge_frame(frame, Question(metric="val_loss", margin=margin, **question), Reading(columns={}))
    return judgement, write(judgement, folder)


def test_files_and_numbers(rows, tmp_path):
    judgement, page = report(rows, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "report.html", "report_light.html", "report.md", "compare.csv", "points.csv", "runs.csv", "figures",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "a/figures").iterdir()} == {
        "forest.csv", "forest.svg", "curves.svg", "metric.csv", "metric_gap.csv",
    }  # fmt: skip
    light, text = (page.with_name(name).read_text() for name in ("report_light.html", "report.md"))
    for row in judgement.arms.itertuples():
        assert row.sentence.replace("'", "&#39;") in light and row.sentence.replace("'", "'") in text
    assert "<script" not in light and "gap in % of the mean of bf16" in light
    assert read_csv(tmp_path / "a/compare.csv")["gap_pct"].iloc[1] == judgement.estimates["mxfp8"].gap
    gaps = read_csv(tmp_path / "a/points.csv").groupby("arm")["gap_pct"].mean()
    assert gaps["nvfp4"] == pytest.approx(judgement.estimates["nvfp4"].gap, rel=1e-12)


def test_a_plain_margin_has_the_unit_of_the_metric(rows, tmp_path):
    _, page = report(rows, tmp_path, margin=0.002)
    light = page.with_name("report_light.html").read_text()
    assert "gap in val_loss" in light and "±0.002" in light and "% of the mean" not in light
    assert "nats" not in light


def test_without_steps_there_are_no_curves(tmp_path):
    frame = pd.DataFrame({"arm": ["bf16", "a"] * 3, "seed": [0, 0, 1, 1, 2, 2], "val_loss": [2, 3, 2.1, 3.2, 2, 3]})
    _, page = report(frame, tmp_path)
    assert not (tmp_path / "figures/curves.svg").exists() and "over steps" not in page.read_text()


def test_hostile_names_are_text(rows, tmp_path):
    frame = rows.replace({"arm": {"nvfp4": HOSTILE}}).rename(columns={"val_loss": "loss" + HOSTILE})
    judgement = judge_frame(frame, Question(metric="loss" + HOSTILE), Reading(columns={}))
    page = write(judgement, tmp_path)
    light = page.with_name("report_light.html").read_text()
    assert "<script>alert" not in light and "&lt;script&gt;alert(1)" in light
    assert not re.search(r"<script>alert", page.read_text().split("</head>")[1])
    assert "<script" not in page.with_name("report.md").read_text()
    for picture in (tmp_path / "figures").glob("*.svg"):
        assert "<script" not in picture.read_text()


def test_an_arm_without_a_gap_and_what_is_left_out(rows, tmp_path):
    rows.loc[rows["arm"].eq("mxfp8") & rows["seed"].eq(1), "val_loss"] = float("inf")
    judgement, page = report(rows[~(rows["arm"].eq("nvfp4") & rows["seed"].eq(3))], tmp_path)
    light = page.with_name("report_light.html").read_text()
    assert "No verdict: seed 1 ends at inf." in light and "Seed 3 has no value in" in light and judgement.left_out
