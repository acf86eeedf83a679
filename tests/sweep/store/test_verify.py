"""The deep look: what a seal cannot say, because the files contradict each other."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hqsweep.sweep.store import seal, sweep_file
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.verify import verify
from hqsweep.train.record import Record, write_record

ROWS = [{"step": step, "metric": "val_loss", "value": 2.5 - step / 10} for step in (1, 2, 3)]


def write_rows(run: RunDir, rows: list[dict]) -> None:
    run.jsonl("metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(make_runs) -> list[RunDir]:
    runs = make_runs("quick", "quick")
    for run in runs:
        write_rows(run, ROWS)
        pq.write_table(pa.Table.from_pylist(ROWS), run.parquet("metrics"))
        run.write_status(state="finished", exit_code=0)
    return runs


def look(folder: Path, **keys) -> tuple[list[tuple[str, str]], list[Path]]:
    """((file, fault) of each fault, what was sealed); it says how many runs it has read."""
    said = []
    faults = verify([folder], done=lambda *numbers: said.append(numbers), **keys)
    assert said == [(number, faults.runs) for number in range(1, faults.runs + 1)]
    return [(Path(fault.file).name, fault.fault) for fault in faults.faults], faults.sealed


def test_what_was_written_has_no_fault(runs):
    assert look(runs[0].sweep_path) == ([], [])


def test_rows_that_contradict_each_other_or_their_copy_are_named_though_sealed(runs):
    write_rows(runs[0], [ROWS[0], ROWS[2], ROWS[1], ROWS[1]])
    runs[0].write_status(state="finished")
    faults, _ = look(runs[0].sweep_path)
    assert faults == [
        ("metrics.jsonl", "line 3 is of an earlier step than the line before"),
        ("metrics.jsonl", "line 4 is there a second time"),
        ("metrics.parquet", "does not hold the rows of the .jsonl beside it"),
    ]


def test_the_config_of_another_run_is_named_though_it_is_sealed(runs):
    runs[0].config_path.write_bytes(runs[1].config_path.read_bytes())
    runs[0].write_status(state="finished")
    faults, _ = look(runs[0].sweep_path)
    assert [name for name, _ in faults] == ["config.yaml", "manifest.json"]


def test_a_checkpoint_that_is_not_what_its_record_says_is_named(runs):
    runs[0].checkpoint.mkdir()
    path = runs[0].checkpoint / "step_3.pt"
    path.write_bytes(b"state")
    write_record(path, Record(file=path.name, sha256="0" * 64, bytes=5, run=runs[0].manifest()["run_id"]))
    assert look(runs[0].sweep_path)[0] == [("step_3.pt", "its bytes are not those that were written")]


def test_a_fork_whose_trunk_has_another_state_now_is_named(make_forks):
    trunk, fork, _ = make_forks("trunk", "quick")
    trunk.checkpoint.mkdir()
    state = trunk.checkpoint / "step_1.pt"
    state.write_bytes(b"state")
    digest = "6bce60f8a6cbb8e8ef7e15a4e29eb1ee8bb9f8d2b3bf8e9e7d1f0a8f2f6c8d3e"
    write_record(state, Record(file=state.name, sha256=digest, bytes=5, run=trunk.manifest()["run_id"], point=True))
    fork.update_manifest(trunk_sha256="1" * 64)
    fork.write_status(state="finished", exit_code=0)
    faults, _ = look(trunk.sweep_path)
    assert ("step_1.pt", f"is not the state from which {fork.name} started") in faults


def test_what_an_earlier_version_finished_is_sealed_as_it_is_and_what_is_wrong_in_itself_is_not(runs):
    folder = runs[0].sweep_path
    (folder / "sweep.json").write_text(json.dumps(sweep_file.read(folder)))
    for run in runs:
        seal.remove(run.path)
    write_rows(runs[1], [ROWS[0], ROWS[0]])
    faults, sealed = look(folder, keep=True)
    assert sealed == [folder / "sweep.json", runs[0].path]
    assert faults == [("seal.json", "is gone")] and runs[0].status()["state"] == "finished"
    assert look(folder, keep=True)[1] == []
