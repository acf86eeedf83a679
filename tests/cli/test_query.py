"""`hqsweep query`: tables, JSON, CSV, exit codes, one sentence for what is wrong."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import FakeRun, three_arms, write_sweep

QUESTION = "arm, seed, min(val_loss) as low where step > 100"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "runs/study", three_arms())
    return tmp_path


def query(*words: str) -> Result:
    return CliRunner().invoke(app, ["query", *words])


def test_one_answer_in_three_forms() -> None:
    rows = json.loads(query(QUESTION, "--json").stdout)
    assert len(rows) == 9 and list(rows[0]) == ["arm", "seed", "low"]
    table = query(QUESTION).stdout.splitlines()
    assert table[0].split() == ["arm", "seed", "low"] and len(table) == 11
    assert table[2].split() == ["bf16", "0", f"{rows[0]['low']:.6g}"]
    read = list(csv.DictReader(io.StringIO(query(QUESTION, "--csv").stdout)))
    assert [float(row["low"]) for row in read] == [row["low"] for row in rows]


def test_nan_is_null_in_json_and_nothing_is_a_line(folder: Path) -> None:
    write_sweep(folder / "runs/broken", [FakeRun(nan_from=150)])
    rows = json.loads(query("step, train_loss where step in (149, 150)", "broken", "--json").stdout)
    assert rows[0]["train_loss"] > 0 and rows[1]["train_loss"] is None
    assert query("arm where arm = 'none'").stdout == "no row\n"


def test_runs_are_named_as_everywhere(folder: Path) -> None:
    write_sweep(folder / "runs/second", [FakeRun(arm="other")])
    assert {row["arm"] for row in json.loads(query("arm", "second", "study/mxfp8", "--json").stdout)} == {
        "other", "mxfp8",
    }  # fmt: skip
    assert len(json.loads(query("run from runs", "--json").stdout)) == 10
    assert "query: no column" in query("armm", "second").stderr and query("arm", "nothing").exit_code == 2


def test_without_a_question_the_columns_are_listed() -> None:
    columns = json.loads(query("--json").stdout)
    assert {"val_loss", "step", "arm", "train.lr", "manifest.device"} <= set(columns["metrics"])
    assert "sqnr_db" in columns["stats"] and query().stdout.startswith("runs: sweep, run, arm")


def test_a_damaged_run_is_named_and_left_out_with_exit_code_3() -> None:
    run = RunStore(Path("runs")).runs("study")[0]
    run.jsonl("metrics").write_text("")
    result = query("run from runs", "--json")
    assert result.exit_code == 3 and len(json.loads(result.stdout)) == 8
    assert result.stderr.startswith(f"hqsweep: left out: study/{run.name} is damaged: metrics.jsonl has 0 bytes")


@pytest.mark.parametrize(
    ("words", "says"),
    [(("arm, val_los",), "no column 'val_los' in runs (did you mean 'val_loss'?)"),
     ((QUESTION, "--csv", "--json"), "one answer has one form"), (("arm", "--runs-dir", "none"), "no sweep in none"),
     (("arm", "nothing"), "'nothing' is no run or sweep")],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_with_exit_code_2(words: tuple[str, ...], says: str) -> None:
    result = query(*words)
    assert result.exit_code == 2 and says in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
