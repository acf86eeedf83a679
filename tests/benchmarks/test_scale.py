"""benchmarks/scale.py: its runs are runs, each command is timed, and published rows are full-size and took less CPU
time than their budgets. What the wall clock said, on a machine that others used as well, stands in the rows."""

import json

from benchmarks import scale
from benchmarks.rows import ROOT
from hqsweep.report.compare.compare import compare

PUBLISHED = ROOT / "reports/benchmarks/scale.jsonl"


def test_runs_that_were_only_written_are_compared_like_trained_ones(tmp_path):
    runs = scale.created(tmp_path, "some", ["recipe=bf16,nvfp4", "seed=range(2)", "train.steps=40"])
    for run in runs:
        scale.log(run, 40)
        scale.finish(run, 40)
    arms = compare(runs, "bf16").arms.set_index("arm")
    assert list(arms["state"]) == ["2 finished"] * 2 and arms.at["nvfp4", "n"] == 2
    assert 2 < arms.at["nvfp4", "final_loss"] < 3.5 and arms.at["bf16", "gemm"] == scale.PLAN


def test_a_command_is_timed_in_its_own_process(tmp_path):
    for run in scale.created(tmp_path, "some", ["recipe=bf16", "seed=range(3)"]):
        scale.finish(run, 100)
    row = scale.timed(["ls"], tmp_path)
    assert 0 < row["cpu_seconds"] < 60 and 0 < row["seconds"] < 120


def test_published_rows_hold_every_command_at_full_size_within_its_budget():
    by_section = {row["section"]: row for row in map(json.loads, PUBLISHED.read_text().splitlines())}
    assert set(by_section) == set(scale.SECTIONS) and by_section["compare"]["megabytes"] < scale.BUDGET_MB
    assert (by_section["compare"]["runs"], by_section["compare"]["steps"]) == (200, 2000)
    assert by_section["ls"]["runs"] == 10_000 and by_section["compose"]["runs"] >= 1000
    for section, row in by_section.items():
        assert row["budget_s"] == scale.BUDGET_S[section] and row["cpu_seconds"] < row["budget_s"]
        assert row["within"] == (row["seconds"] < row["budget_s"])
