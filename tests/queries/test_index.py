"""The tables of queries: what they hold, and an index that is never out of date."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from hqsweep.errors import Damaged, UserError
from hqsweep.queries import held, index
from hqsweep.queries.held import MANY, table_of
from hqsweep.queries.index import Tables
from hqsweep.queries.sql import ask
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import FakeRun, three_arms, write_sweep

LOSS = "select run, val_loss from runs order by run"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setattr(index, "SETTLED_S", -1.0)
    write_sweep(tmp_path / "study", three_arms())
    return RunStore(tmp_path)


def answer(store: RunStore, question: str) -> list[dict]:
    return ask(question, Tables(store.all_runs(), root=store.root)).to_pylist()


def reads(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs whose folders a query reads."""
    names, read = [], index._rows
    monkeypatch.setattr(index, "_rows", lambda path, table: names.append(Path(path).name) or read(path, table))
    answer(store, LOSS)
    monkeypatch.setattr(index, "_rows", read)
    return names


def test_values_are_the_ones_in_the_files(store: RunStore) -> None:
    run = store.runs("study")[4]
    rows = [row for row in run.rows("metrics") if row["step"] > 100 and row["metric"] == "val_loss"]
    asked = answer(store, f"select min(val_loss) as low, count(val_loss) as n from metrics where run = '{run.name}' "
                          "and step > 100")  # fmt: skip
    assert asked == [{"low": min(row["value"] for row in rows), "n": len(rows)}]
    config, manifest = run.config(), run.manifest()
    facts = answer(store, f"arm, seed, train.lr, manifest.device from runs where run = '{run.name}'")
    assert facts == [{
        "arm": manifest["arm"], "seed": config["seed"], "train.lr": config["train"]["lr"],
        "manifest.device": manifest["device"],
    }]  # fmt: skip
    sampled = answer(store, f"select count(*) as n, min(sqnr_db) as low from stats where run = '{run.name}'")
    stats = run.rows("stats")
    assert sampled == [{"n": len(stats), "low": min(row["sqnr_db"] for row in stats)}]


def test_the_index_answers_as_the_files_do(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = (LOSS, "arm, seed, step, val_loss", "arm, layer, max(sqnr_db)", "select * from metrics")
    cold = [answer(store, question) for question in questions]
    assert {path.name for path in (store.root / ".query").iterdir()} == {
        "runs.0.parquet", "metrics.0.parquet", "stats.0.parquet",
    }  # fmt: skip
    assert json.dumps([answer(store, question) for question in questions]) == json.dumps(cold)  # NaN equals NaN so
    assert reads(store, monkeypatch) == []


def test_a_run_that_is_repeated_is_read_anew(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(store, LOSS)
    run = store.runs("study")[2]
    lines = run.jsonl("metrics").read_text().splitlines()
    changed = json.loads(lines[-1]) | {"metric": "val_loss", "value": 1.25}
    run.write_status(state="pending")
    run.jsonl("metrics").write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
    run.write_status(state="finished")
    assert reads(store, monkeypatch) == [run.name]
    assert {row["run"]: row["val_loss"] for row in answer(store, LOSS)}[run.name] == 1.25
    assert reads(store, monkeypatch) == []  # and its new rows are in the index


def test_a_file_of_the_old_size_and_time_is_not_the_old_file(store: RunStore) -> None:
    answer(store, LOSS)
    run = store.runs("study")[0]
    path, before = run.jsonl("metrics"), run.jsonl("metrics").stat()
    path.write_bytes(path.read_bytes().replace(b'"value": 1', b'"value": 9').replace(b'"value": 2', b'"value": 9'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    tables = Tables(store.all_runs(), root=store.root)
    assert run.name not in {row["run"] for row in ask(LOSS, tables).to_pylist()}  # its seal says that it was changed
    assert [(entry.run, entry.state) for entry in tables.left_out] == [(f"study/{run.name}", "damaged")]


def test_a_run_at_work_is_never_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SETTLED_S", -1.0)
    write_sweep(tmp_path / "study", [FakeRun(), FakeRun(arm="mxfp8", state="running", steps=50)])
    store = RunStore(tmp_path)
    held = store.runs("study")[1]
    held.write_status(host=socket.gethostname())
    states = {row["arm"]: row["state"] for row in answer(store, "arm, state from runs")}
    assert states == {"bf16": "finished", "mxfp8": "interrupted"}  # no process holds its lock
    assert keys_of(tmp_path, "runs") == {f"study/{store.runs('study')[0].name}"}
    with held.lock():
        assert answer(store, "state from runs where arm = 'mxfp8'") == [{"state": "running"}]


def test_files_that_changed_a_moment_ago_are_not_indexed(tmp_path: Path) -> None:
    write_sweep(tmp_path / "study", three_arms())
    answer(RunStore(tmp_path), LOSS)
    assert not (tmp_path / ".query").exists()


def test_a_moved_sweep_is_named_as_it_is_now(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(store, LOSS)
    (store.root / "study").rename(store.root / "moved")
    runs = [RunDir(store.root / "moved" / run.name) for run in store.runs("moved")]
    asked = ask("sweep, path from runs limit 1", Tables(runs)).to_pylist()
    assert asked == [{"sweep": "moved", "path": str(runs[0].path)}]


@pytest.mark.parametrize("garbage", [b"", b"PAR1 and no more", b"x" * 4000])
def test_an_index_of_garbage_is_made_anew(store: RunStore, garbage: bytes) -> None:
    before = answer(store, LOSS)
    path = store.root / ".query/runs.0.parquet"
    path.write_bytes(garbage)
    assert answer(store, LOSS) == before and len(keys_of(store.root, "runs")) == 9
    assert not path.exists()  # no later query reads it again


def test_an_index_that_cannot_be_written_is_none(store: RunStore, tmp_path: Path) -> None:
    (store.root / ".query").write_text("in the way")
    assert len(answer(store, LOSS)) == 9
    (store.root / ".query").unlink()
    (tmp_path / "elsewhere").mkdir()
    (store.root / ".query").symlink_to(tmp_path / "elsewhere")
    assert len(answer(store, LOSS)) == 9 and not list((tmp_path / "elsewhere").iterdir())


def test_metrics_of_odd_names_hide_no_fact(tmp_path: Path) -> None:
    write_sweep(tmp_path / "study", [FakeRun()])
    run = RunStore(tmp_path).runs("study")[0]
    run.write_status(state="pending")
    names = ("seed", "step", "run", "Loss", "loss", 'a"b', "x; drop", "train.lr")
    rows = [{"step": 1, "metric": name, "value": float(place)} for place, name in enumerate(names)]
    run.jsonl("metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_status(state="finished")
    store = RunStore(tmp_path)
    whole = answer(store, "select * from metrics")[0]
    assert (whole["seed"], whole["step"], whole["run"]) == (0, 1, run.name)
    assert (whole["metric.seed"], whole["metric.step"], whole["metric.train.lr"]) == (0.0, 1.0, 7.0)
    assert (whole["Loss"], whole['a"b'], whole["x; drop"]) == (3.0, 5.0, 6.0)


def test_runs_that_cannot_be_trusted_are_left_out_and_none_is_a_sentence(store: RunStore) -> None:
    runs = store.runs("study")
    (store.root / "study/stray").mkdir()
    (store.root / "study/stray/config.yaml").write_text("job: convergence\n")
    runs[1].jsonl("metrics").unlink()
    tables = Tables(store.all_runs())
    assert len(ask(LOSS, tables)) == 8
    assert {entry.state for entry in tables.left_out} == {"foreign", "damaged"}
    with pytest.raises(Damaged, match=r"metrics\.jsonl: is gone"):
        ask(LOSS, Tables([runs[1]]))
    with pytest.raises(UserError, match=r"query: no run to read"):
        Tables([])


def keys_of(folder: Path, table: str) -> set[str]:
    """The runs that the index in a folder has."""
    return {key for each in held.opened(folder, table) for key in each.runs}


def lone(store: RunStore, sweep: str, **changes: object) -> RunDir:
    """A run of a sweep of its own, with these keys in its manifest."""
    write_sweep(store.root / sweep, [FakeRun()])
    run = store.runs(sweep)[0]
    run.write_status(state="pending")
    run.update_manifest(**changes)
    run.write_status(state="finished")
    return run


def test_new_and_deleted_runs_are_seen(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer(store, LOSS)
    new = lone(store, "later")
    assert reads(store, monkeypatch) == [new.name]
    assert answer(store, "select count(*) as n from runs") == [{"n": 10}]
    shutil.rmtree(store.root / "later")
    assert reads(store, monkeypatch) == [] and answer(store, LOSS) == before


def test_files_of_the_index_stay_few_and_forget_deleted_runs(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(store, LOSS)
    for number in range(MANY + 1):
        lone(store, f"more{number}")
        answer(store, LOSS)
        shutil.rmtree(store.root / f"more{max(0, number - 3)}", ignore_errors=True)
    assert len(list((store.root / ".query").glob("runs.*"))) <= MANY
    assert "more0" not in {key.split("/")[0] for key in keys_of(store.root, "runs")}
    fresh = [ask(LOSS, Tables(store.all_runs())).to_pylist(), answer(store, LOSS)]
    assert json.dumps(fresh[0]) == json.dumps(fresh[1]) and reads(store, monkeypatch) == []


def test_a_sweep_elsewhere_has_an_index_of_its_own(store: RunStore) -> None:
    runs = store.runs("study")
    asked = ask(LOSS, Tables(runs, root=store.root / "elsewhere")).to_pylist()
    assert keys_of(store.root / "study", "runs") == {run.name for run in runs} and not (store.root / ".query").exists()
    assert json.dumps(asked) == json.dumps(answer(store, LOSS))


def test_another_sweep_in_the_index_changes_no_type_and_no_name(store: RunStore) -> None:
    lone(store, "counts", note=3, more=1)
    lone(store, "texts", note="three", other=2)
    whole = answer(store, "sweep, manifest.note from runs where sweep != 'study' order by sweep")
    assert [row["manifest.note"] for row in whole] == ["3", "three"]
    tables = Tables(store.runs("counts"), root=store.root)
    assert ask('select "manifest.note" + 1 as next from runs', tables).to_pylist() == [{"next": 4}]
    assert "manifest.more" in tables.columns("runs")[1] and "manifest.other" not in tables.columns("runs")[1]


def test_columns_of_several_types_become_text_or_floats() -> None:
    mixed = table_of([{"a": 1, "b": 1, "c": None}, {"a": 1.5, "b": "x", "d": True}])
    assert mixed.to_pylist() == [
        {"a": 1.0, "b": "1", "c": None, "d": None}, {"a": 1.5, "b": "x", "c": None, "d": True},
    ]  # fmt: skip
    assert table_of([{"a": 1}, {"a": "x"}, {"a": 2**70}, {"a": [1]}]).to_pydict() == {
        "a": ["1", "x", str(2**70), "[1]"]
    }
