"""benchmarks/publish.py: what is published, and what is refused."""

import json

import pytest

from benchmarks.publish import publish
from benchmarks.rows import markdown

PLACE = {"benchmark": "quantize", "device": "D", "torch": "2", "hqsweep": "1", "commit": "abc"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_last_row_of_a_case_counts_and_keeps_its_place(tmp_path):
    first = {"section": "single", "case": "a|b", "us": 2.0, **PLACE}
    other = {"section": "single", "case": "c", "error": "refused", **PLACE}
    files = [write(tmp_path / "1", first, other), write(tmp_path / "2", first | {"us": 1.0, "commit": "def"})]
    written = publish(files, tmp_path / "to")
    assert [path.name for path in written] == ["quantize.jsonl", "quantize.md"]
    rows = [json.loads(line) for line in written[0].read_text().splitlines()]
    assert [(r["case"], r.get("us"), r["commit"]) for r in rows] == [("a|b", 1.0, "def"), ("c", None, "abc")]
    page = written[1].read_text()
    assert "| a\\|b | 1 |  |" in page and "refused" in page and "commit def" in page


def test_rows_that_differ_in_a_setting_are_all_kept(tmp_path):
    settings = [{"weights": w, "splits": s} for w in ("kept", "each step") for s in ("list", "device")]
    rows = [
        {"section": "linear", "case": "mxfp8", "us": 1.0, **PLACE, "benchmark": "grouped"} | each for each in settings
    ]
    written = publish([write(tmp_path / "1", *rows)], tmp_path / "to")
    assert len(written[0].read_text().splitlines()) == 4


def test_rows_of_unknown_origin_are_refused(tmp_path):
    row = {"section": "single", "case": "a"} | PLACE
    del row["commit"]
    with pytest.raises(SystemExit, match=r":1: not a row to publish; missing \['commit'\]"):
        publish([write(tmp_path / "1", row)], tmp_path / "to")


def test_a_table_has_the_columns_that_rows_have():
    assert markdown([{"a": 1.23456, "b": True}, {"a": None}], ("a", "b", "c")).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| 1.235 | yes |",
        "|  |  |",
    ]
