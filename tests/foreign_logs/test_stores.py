"""The stores of MLflow and trackio give the verdict of judge_whole_runs on the same numbers; neither is installed."""

import json
import sqlite3

import pytest

from hqsweep.errors import UserError
from tests.foreign_logs.test_tables import is_right, judged


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def put_mlflow(rows, folder):
    """The files that MLflow 3.17 writes, as far as they are read."""
    put(folder / "7/meta.yaml", "experiment_id: '7'\nlifecycle_stage: active\nname: study\n")
    for (arm, seed), run in rows.groupby(["arm", "seed"]):
        place = folder / f"7/{arm}{seed}"
        put(place / "meta.yaml", f"lifecycle_stage: active\nrun_id: {arm}{seed}\nrun_name: clever-fox-{seed}\n")
        put(place / "params/recipe", arm)
        put(place / "params/seed", str(seed))
        lines = [f"1795874891422 {row.val_loss!r} {row.step}\n" for row in run.itertuples()]
        put(place / "metrics/eval/val_loss", "".join(lines))
        put(place / "metrics/lr", "1795874891422 0.1 0\n")


def test_a_folder_of_mlflow(rows, here):
    put_mlflow(rows, here / "mlruns")
    found = [judged(folder, metric="eval/val_loss") for folder in ("mlruns", "mlruns/7", ".")]
    assert all(is_right(each, rows) for each in found)


def test_a_value_that_mlflow_has_twice_and_a_deleted_run(rows, here):
    put_mlflow(rows, here / "mlruns")
    put(here / "mlruns/7/gone/meta.yaml", "lifecycle_stage: deleted\nrun_name: x\n")
    put(here / "mlruns/7/gone/metrics/eval/val_loss", "1 9.0 200\n")
    again = here / "mlruns/7/bf160/metrics/eval/val_loss"
    again.write_text(again.read_text() + "1795874891499 2.5 200\n")
    rows.loc[rows["arm"].eq("bf16") & rows["seed"].eq(0) & rows["step"].eq(200), "val_loss"] = 2.5
    assert is_right(judged("mlruns", metric="eval/val_loss"), rows)


def test_damaged_files_of_mlflow(rows, here):
    put_mlflow(rows, here / "mlruns")
    put(here / "mlruns/7/bf160/metrics/eval/val_loss", "1795874891422 2.5 100\nx\n")
    with pytest.raises(UserError, match=r"metrics/eval/val_loss: line 2 is no value of MLflow"):
        judged("mlruns", metric="eval/val_loss")
    put(here / "mlruns/7/bf160/meta.yaml", "- a\n")
    with pytest.raises(UserError, match=r"meta.yaml: is no run of MLflow"):
        judged("mlruns", metric="eval/val_loss")


def put_trackio(rows, path, key="run_id"):
    """The tables that trackio 0.43 writes, as far as they are read; early versions had no run_id."""
    first = "" if key == "run_name" else "run_id TEXT NOT NULL, "
    with sqlite3.connect(path) as database:
        database.execute(
            f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {first}run_name TEXT, step INTEGER, metrics TEXT)"
        )
        database.execute(f"CREATE TABLE configs (id INTEGER PRIMARY KEY, {first}run_name TEXT, config TEXT)")
        for (arm, seed), run in rows.groupby(["arm", "seed"]):
            name = f"fox-{arm}-{seed}"
            named = [name] if key == "run_name" else ["id" + name, name]
            marks = ", ".join("?" * len(named))
            config = {"model": {"recipe": arm}, "seed": seed, "_Group": None, "_Username": "x"}
            columns = ", ".join(["run_id", "run_name"][-len(named) :])
            database.execute(
                f"INSERT INTO configs ({columns}, config) VALUES ({marks}, ?)", [*named, json.dumps(config).encode()]
            )
            for row in run.itertuples():
                cells = json.dumps({"val_loss": row.val_loss, "bad_loss": "NaN", "text": "x"}).encode()
                database.execute(
                    f"INSERT INTO metrics ({columns}, step, metrics) VALUES ({marks}, ?, ?)", [*named, row.step, cells]
                )
    database.close()


@pytest.mark.parametrize("key", ["run_id", "run_name"])
def test_a_file_of_trackio(rows, here, key):
    put_trackio(rows, here / "study.db", key)
    for place in ("study.db", "."):
        assert is_right(judged(place, columns={"arm": "model.recipe"}), rows)
    broken = judged("study.db", metric="bad_loss", columns={"arm": "model.recipe"})
    assert set(broken.arms["verdict"]) == {"baseline", "not finite"}


def test_a_database_of_mlflow(rows, here):
    with sqlite3.connect("mlflow.db") as database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, lifecycle_stage TEXT, start_time INTEGER)")
        database.execute("CREATE TABLE params (run_uuid TEXT, key TEXT, value TEXT)")
        columns = "run_uuid TEXT, key TEXT, value DOUBLE, step INTEGER, is_nan BOOLEAN, timestamp INTEGER"
        database.execute(f"CREATE TABLE metrics ({columns})")
        database.execute("INSERT INTO runs VALUES ('gone', 'bf16', 'deleted', 0)")
        database.execute("INSERT INTO metrics VALUES ('gone', 'val_loss', 9, 200, 0, 0)")
        for (arm, seed), run in rows.groupby(["arm", "seed"]):
            database.execute("INSERT INTO runs VALUES (?, ?, 'active', 1)", (f"{arm}{seed}", f"{arm}-s{seed}"))
            cells = [(f"{arm}{seed}", "val_loss", row.val_loss, row.step, 0, row.step) for row in run.itertuples()]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", cells)
            database.execute("INSERT INTO metrics VALUES (?, 'bad_loss', 0, 1, 1, 0)", (f"{arm}{seed}",))
    database.close()
    assert is_right(judged("mlflow.db"), rows)
    assert "not finite" in set(judged("mlflow.db", metric="bad_loss").arms["verdict"])


def test_other_files_with_that_name(here):
    (here / "a.db").write_text("arm,seed,loss\n")
    with pytest.raises(UserError, match=r"a.db: is no SQLite file that can be read"):
        judged("a.db")
    sqlite3.connect("b.db").execute("CREATE TABLE x (y)").connection.close()
    with pytest.raises(UserError, match=r"b.db: is no file of MLflow or trackio, .* it has x"):
        judged("b.db")
