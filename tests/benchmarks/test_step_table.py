"""benchmarks/step_table.py: the table in the guide is that of the published rows."""

import json

import pytest

from benchmarks import step_table
from benchmarks.publish import publish
from benchmarks.rows import ROOT

PLACE = {"benchmark": "step", "device": "D", "torch": "2", "hqsweep": "1", "commit": "abc"}
OURS = {"section": "time", "case": "hqsweep", "recipe": "mxfp8", "mode": "auto", "deterministic": "on", **PLACE}
ROWS = [
    {"section": "floors", "size": "S", "case": "norm", "floor_ms": 1.0, **PLACE},
    {"section": "time", "size": "S", "case": "torch compiled", "ms": 9.0, "share": 1.0, "peak_gb": 3.5, **PLACE},
    OURS | {"size": "S", "ms": 10.0, "share": 0.9, "peak_gb": 2.94},
    OURS | {"size": "S", "ms": 30.0, "share": 0.3, "mode": "off"},
    OURS | {"size": "S", "ms": 8.0, "share": 1.1, "deterministic": "off"},
    OURS | {"size": "M", "error": "out of memory"},
    OURS | {"size": "M", "recipe": "bf16", "ms": 67.25, "share": 1.004},
]


def test_the_table_has_the_cases_that_ran_as_they_do_by_default():
    assert step_table.step_table(ROWS).splitlines() == [
        "| recipe | S | M |",
        "|---|---|---|",
        "| torch compiled | 1.00, 9.0 ms |  |",
        "| `bf16` |  | 1.00, 67.2 ms |",
        "| `mxfp8` | 0.90, 10.0 ms |  |",
        "",
        "GB at the peak of a step:",
        "",
        "| recipe | S |",
        "|---|---|",
        "| torch compiled | 3.5 |",
        "| `mxfp8` | 2.9 |",
    ]


def test_publishing_writes_it_between_the_marks(tmp_path):
    guide, rows = tmp_path / "guide.md", tmp_path / "rows.jsonl"
    guide.write_text(f"before\n{step_table.BEGIN}old\n{step_table.END}after\n")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert guide in publish([rows], tmp_path / "to", guide)
    text = guide.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert step_table.step_table(ROWS) in text


def test_the_guide_has_the_published_rows():
    published = ROOT / "reports" / "benchmarks" / "step.jsonl"
    if not published.exists():
        pytest.skip("no rows of steps are published")
    rows = [json.loads(line) for line in published.read_text().splitlines()]
    assert step_table.step_table(rows) in step_table.PAGE.read_text()
