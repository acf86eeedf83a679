"""`hqsweep judge`: the table and JSON, exit codes, options of columns, hostile names."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app

ROWS = "arm,seed,acc\nbf16,0,0.7\nbf16,1,0.72\nbf16,2,0.71\nfast,0,0.68\nfast,1,0.701\nfast,2,0.69\n"


def judge(*words: str) -> Result:
    return CliRunner().invoke(app, ["judge", *words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(ROWS)
    return tmp_path


def test_the_table_has_the_verdict_and_the_sentence():
    said = judge("a.csv", "--margin", "0.005")
    assert said.exit_code == 0
    assert "acc (higher is better), 1 arm against bf16, margin 0.005" in said.output
    assert "fast: worse than 'bf16' by 0.0197 (95 % interval -0.0211 to -0.0182) over 3 seeds." in said.output
    assert "nats" not in said.output and "loss" not in said.output


def test_json_is_for_programs():
    document = json.loads(judge("a.csv", "--json", "--lower-is-better").output)
    assert document["arms"][0]["verdict"] == "better" and document["lower_is_better"]
    assert {"gap", "ci_low", "ci_high", "n", "needed", "metric_gap", "sentence"} <= set(document["arms"][0])
    assert (document["unit"], document["margin"]) == ("% of the baseline's mean", 0.25)


def test_what_is_left_out_ends_with_3_or_with_partial_with_0(folder):
    (folder / "a.csv").write_text(ROWS.removesuffix("fast,2,0.69\n"))
    said = judge("a.csv")
    assert said.exit_code == 3 and "Left out: Seed 2 has no value in 'fast' and enters no gap." in said.output
    assert judge("a.csv", "--partial").exit_code == 0


def test_columns_can_be_named(folder):
    (folder / "a.csv").write_text(ROWS.replace("arm,seed,acc", "x,y,z"))
    words = ("--arm-column=x", "--seed-column=y", "--higher-is-better")
    assert judge("a.csv", *words).exit_code == 0
    wrong = judge("a.csv", "--arm-column=w", *words[1:])
    assert wrong.exit_code == 2 and "--arm-column: no column 'w'" in wrong.output and "'x', 'y', 'z'" in wrong.output


@pytest.mark.parametrize(
    "words", [["gone.csv"], ["a.csv", "--margin=0%"], ["a.csv", "--window=0"], [".", "--metric=b"]]
)
def test_wrong_input_gets_one_sentence_and_2(words):
    said = judge(*words)
    assert said.exit_code == 2 and said.output.count("\n") == 1 and said.output.startswith("hqsweep: ")


def test_hostile_names_reach_no_terminal(folder):
    hostile = ROWS.replace("fast", '"\x1b[31m\u202e\nx"').replace("acc", '"acc\x1b]0;t\x07"')
    (folder / "a.csv").write_text(hostile, encoding="utf-8")
    for words in (["a.csv"], ["a.csv", "--baseline=no"], ["a.csv", "--metric=no"]):
        output = judge(*words).output
        assert "\\x1b" in output and not {"\x1b", "\x07", "\u202e"} & set(output)


def test_a_report_is_written_where_it_is_asked_for(folder):
    said = judge("a.csv", "--out", "r")
    assert said.exit_code == 0 and "report: r/report.html" in said.output and (folder / "r/report.md").exists()
    assert json.loads(judge("a.csv", "--out", "r", "--json").output)["report"] == "r/report.html"


def test_a_stored_baseline_gates(folder):
    assert judge("a.csv", "--store", "b.json").exit_code == 0
    assert judge("a.csv", "--gate", "b.json").exit_code == 0
    (folder / "a.csv").write_text(ROWS.replace("0.68", "0.63").replace("0.701", "0.651").replace("0.69\n", "0.64\n"))
    said = judge("a.csv", "--gate", "b.json", "--junit", "j.xml")
    assert said.exit_code == 1 and "regression" in said.output and "<failure" in (folder / "j.xml").read_text()
    same = CliRunner().invoke(app, ["gate", "a.csv", "--baseline", "b.json", "--json"])
    document = json.loads(same.output)
    assert same.exit_code == 1 and document["outcome"] == "regression" and document["metric"] == "acc"
    loose = CliRunner().invoke(app, ["gate", "a.csv", "--baseline", "b.json", "--margin", "0.2"])
    assert loose.exit_code == 0 and "inside the margin of 0.2" in " ".join(loose.output.split())
    assert judge("a.csv", "--gate", "b.json", "--metric", "acc").exit_code == 2
    assert judge("a.csv", "--gate", "none.json").exit_code == 2


def test_plan_by_logs():
    plan = ["plan", "--from", "a.csv", "--resolve"]
    said = CliRunner().invoke(app, [*plan, "1%"])
    assert said.exit_code == 0 and "seeds decide 1 % for every arm, in 4 of 5 studies" in said.output
    document = json.loads(CliRunner().invoke(app, [*plan, "0.01", "--json"]).output)
    assert document["unit"] == "acc" and document["noise"][0]["n"] == 3
    for words in ([*plan, "x"], [*plan, "1%", "conf=quickstart"], ["plan", "--resolve", "1%"]):
        wrong = CliRunner().invoke(app, words)
        assert wrong.exit_code == 2 and wrong.output.count("\n") == 1
