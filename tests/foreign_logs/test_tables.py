"""Every kind of table gives the verdict that judge_whole_runs gives for the same numbers."""

import gzip
import json
import math
from pathlib import Path

import pandas as pd
import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs import tables
from hqsweep.foreign_logs.judge import Judgement, Question
from hqsweep.foreign_logs.logs import Reading, judge_files
from hqsweep.verdicts import judging
from tests.foreign_logs.conftest import finals


def judged(*paths: str | Path, metric: str = "", **reading: object) -> Judgement:
    question = Question(metric=metric, margin=0.002)
    return judge_files([*map(Path, paths)], question, Reading(**{"columns": {}} | reading))


def is_right(judgement: Judgement, rows: pd.DataFrame) -> bool:
    expected = judging.judge_whole_runs(finals(rows), baseline="bf16", margin=0.002)
    return judgement.estimates == expected and not judgement.left_out


def write_jsonl(path: Path, rows: pd.DataFrame) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_dict("records")))


WRITERS = {
    "a.csv": lambda path, rows: rows.to_csv(path, index=False),
    "a.tsv": lambda path, rows: rows.to_csv(path, index=False, sep="\t"),
    "b.csv": lambda path, rows: rows.to_csv(path, index=False, sep=";", encoding="utf-8-sig"),
    "a.csv.gz": lambda path, rows: rows.to_csv(path, index=False),
    "a.jsonl": write_jsonl,
    "a.json": lambda path, rows: rows.to_json(path, orient="records", double_precision=15),
    "a.parquet": lambda path, rows: rows.to_parquet(path, index=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_table(name, rows, here):
    WRITERS[name](here / name, rows)
    judgement = judged(name)
    assert judgement.arms["verdict"].tolist() == ["baseline", "equivalent", "worse"]
    assert is_right(judgement, rows if name != "a.json" else pd.read_json(name))


def test_packed_json_lines(rows, here):
    write_jsonl(here / "plain.jsonl", rows)
    (here / "a.jsonl.gz").write_bytes(gzip.compress((here / "plain.jsonl").read_bytes()))
    assert is_right(judged("a.jsonl.gz"), rows)


def test_json_of_several_kinds_is_read_all_the_same(rows, here, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 100)
    lines = [json.dumps(row) for row in rows.to_dict("records")]
    lines[3:5] = [json.dumps(row | {"seed": str(row["seed"])}) for row in map(json.loads, lines[3:5])]
    (here / "mixed.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(tables, "HEAD", 100)
    (here / "late.jsonl").write_text("\n\n".join(lines))
    assert is_right(judged("mixed.jsonl"), rows) and is_right(judged("late.jsonl"), rows)
    (here / "late.jsonl").write_text("\n".join([*lines, "{"]))
    with pytest.raises(UserError, match=r"late.jsonl: line 25 is no JSON"):
        judged("late.jsonl")
    (here / "late.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff")
    with pytest.raises(UserError, match=r"late.jsonl: is no text in UTF-8"):
        judged("late.jsonl")


def test_rows_without_the_metric_are_steps_at_which_it_was_not_logged(rows, here):
    train = rows.assign(step=rows["step"] + 50).rename(columns={"val_loss": "train_loss"})
    both = pd.concat([rows, train], ignore_index=True)
    both.to_csv("a.csv", index=False)
    write_jsonl(here / "a.jsonl", rows)
    with (here / "a.jsonl").open("a") as lines:
        lines.write('{"arm": "bf16", "seed": 0, "step": 250, "train_loss": 2.0}\n')
    both.to_parquet("a.parquet")
    assert all(is_right(judged(name), rows) for name in ("a.csv", "a.jsonl", "a.parquet"))


def test_columns_of_other_names_are_found_or_named(rows, here):
    rows.rename(columns={"arm": " Recipe", "step": "global_step"}).to_csv("found.csv", index=False)
    assert is_right(judged("found.csv"), rows)
    rows.rename(columns={"arm": "what", "seed": "draw", "val_loss": "ce"}).to_csv("named.csv", index=False)
    with pytest.raises(UserError, match=r"no column of arms, .* it has 'what', 'draw', 'step', 'ce'; name one with"):
        judged("named.csv")
    with pytest.raises(UserError, match=r"--arm-column: no column 'wat' \(did you mean 'what'\?\)"):
        judged("named.csv", columns={"arm": "wat"})
    question = Question(metric="ce", margin=0.002, lower=True)
    asked = judge_files([Path("named.csv")], question, Reading(columns={"arm": "what", "seed": "draw"}))
    assert is_right(asked, rows)


def test_names_of_runs_hold_arm_and_seed(rows, here):
    names = rows["arm"] + "-s" + rows["seed"].astype(str)
    rows.assign(run=names).drop(columns=["arm", "seed"]).to_csv("runs.csv", index=False)
    rows.assign(run=names).drop(columns="arm").to_csv("both.csv", index=False)
    assert is_right(judged("runs.csv"), rows) and is_right(judged("both.csv"), rows)
    rows.assign(run="bf16").drop(columns=["arm", "seed"]).to_csv("none.csv", index=False)
    with pytest.raises(UserError, match="no column of seeds, and no seed in 'bf16', as in bf16-s0"):
        judged("none.csv")


def test_a_table_with_a_row_for_each_metric(rows, here):
    long = rows.melt(["arm", "seed", "step"], var_name="metric")
    pd.concat([long, long.assign(metric="acc", value=0.5)]).to_csv("long.csv", index=False)
    write_jsonl(here / "long.jsonl", long)
    assert is_right(judged("long.csv"), rows) and is_right(judged("long.jsonl"), rows)
    with pytest.raises(UserError, match=r"no row of the metric 'val_los' \(did you mean 'val_loss'\?\)"):
        judged("long.csv", metric="val_los")


def test_a_folder_has_a_file_for_each_run(rows, here):
    (here / "logs").mkdir()
    for (arm, seed), run in rows.groupby(["arm", "seed"]):
        run[["step", "val_loss"]].to_csv(here / f"logs/{arm}_seed{seed}.csv", index=False)
    assert is_right(judged("logs"), rows)
    for (arm, seed), run in rows.groupby(["arm", "seed"]):
        run[["seed", "step", "val_loss"]].to_csv(here / f"logs/{arm}_seed{seed}.csv", index=False)
    assert is_right(judged(*sorted((here / "logs").iterdir())), rows)


def test_an_export_of_wandb(rows, here):
    wide = rows.assign(run=rows["arm"] + "-s" + rows["seed"].astype(str)).pivot(
        index="step", columns="run", values="val_loss"
    )
    for name in list(wide):
        wide[f"{name} - val_loss"] = wide[f"{name} - val_loss__MIN"] = wide[f"{name} - val_loss__MAX"] = wide.pop(name)
    wide.rename_axis("Step").reset_index().to_csv("wandb_export.csv", index=False)
    assert is_right(judged("wandb_export.csv"), rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("arm,seed,val_loss\n", "no row has a value of 'val_loss'"),
        ("arm,seed,val_loss\nbf16,0,high\n", "invalid value 'high'"),
        ("arm,seed,val_loss\nbf16,0\n", "Expected 3 columns, got 2"),
        ("arm,arm,seed,val_loss\na,b,0,1\n", "two columns are called 'arm'"),
        ("arm,seed,a,b\nbf16,0,1,2\n", "no column 'val_loss', .* it has 'a', 'b'; give one with --metric"),
        ("arm\xff,seed\n1,2\n", "can't decode byte 0xff"),
    ],
)
def test_a_bad_csv_gets_a_sentence(text, said, here):
    (here / "a.csv").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=said):
        judged("a.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"arm": "bf16", "seed": 0, "val_loss": 2.0}\n{"arm": "b', "line 2 is no JSON"),
        ("[1, 2]", "entry 1 is no object"),
        ("3\n", "line 1 is no object"),
        ('{"arm": "bf16", "seed": 0, "val_loss": 2.0}\n{"arm": "b", "seed": 0, "val_loss": [1]}', "is no number"),
    ],
)
def test_bad_json_lines_get_a_sentence(text, said, here):
    (here / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        judged("a.jsonl", metric="val_loss")


def test_a_bad_parquet_and_other_files_get_a_sentence(here):
    (here / "a.parquet").write_bytes(b"PAR1 no")
    (here / "a.xlsx").write_bytes(b"")
    (here / "empty").mkdir()
    for path, said in {
        "a.parquet": "a.parquet: ",
        "a.xlsx": "is of no known kind; it takes .csv",
        "empty": "no file of TensorBoard, W&B, MLflow or trackio",
        "gone.csv": "no such file or folder",
    }.items():
        with pytest.raises(UserError, match=said):
            judged(path)


def test_nan_and_inf_are_values_and_an_empty_cell_is_none(here):
    (here / "a.csv").write_text("arm,seed,acc\nbf16,0,1\nbf16,1,2\na,0,nan\na,1,1\nb,0,2\nb,1,inf\nc,0,1\nc,1,\n")
    arms = judged("a.csv").arms.set_index("arm")
    assert arms["verdict"].to_dict() == {"bf16": "baseline", "c": "undecided", "a": "not finite", "b": "not finite"}
    assert math.isnan(arms.at["a", "gap_pct"]) and arms.at["b", "sentence"] == "No verdict: seed 1 ends at inf."
