"""Seals: what is changed after the end of a run is named."""

import json
import shutil

import pytest

from hqsweep.errors import Damaged
from hqsweep.sweep.store import seal
from hqsweep.sweep.store.run_dir import RunDir


@pytest.fixture
def run(make_runs) -> RunDir:
    """A finished run with rows, their Parquet copy (any bytes do) and a captured file."""
    (run,) = make_runs("quick")
    run.jsonl("metrics").write_text('{"step": 1, "metric": "val_loss", "value": 2.5}\n')
    run.parquet("metrics").write_bytes(b"PAR1")
    (run.path / "captured").mkdir()
    (run.path / "captured" / "step_1.safetensors").write_bytes(b"operands")
    run.write_status(state="finished", exit_code=0)
    return run


def faults(run: RunDir) -> list[str]:
    return [str(fault) for fault in seal.faults(run.path, seal.state(run.path))]


def test_a_finished_run_is_sealed_and_whole(run):
    files = seal.state(run.path)
    assert sorted(files) == [
        "captured/step_1.safetensors", "config.yaml", "manifest.json", "metrics.jsonl", "metrics.parquet", "status.json"
    ]  # fmt: skip
    assert faults(run) == []
    seal.survey(run.path, files)


def test_a_copy_of_the_folder_is_as_good(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "elsewhere" / run.name)
    assert list(seal.faults(copy, seal.state(copy))) == []


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "status.json", "metrics.jsonl", "metrics.parquet",
                                  "captured/step_1.safetensors"])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "cut", "append", "delete"])
def test_every_change_of_a_covered_file_is_named(run, name, damage):
    path = run.path / name
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "append": data * 2}[damage])
    (fault,) = faults(run)
    said = {"flip": "not what it was", "cut": "bytes, and had", "append": "bytes, and had", "delete": "is gone"}[damage]
    assert str(path) in fault and said in fault and "`hqsweep run`" in fault
    if damage != "flip" or name in seal.SMALL:  # a look that reads no rows
        with pytest.raises(Damaged, match=said):
            seal.survey(run.path, seal.state(run.path))


def test_rows_that_were_not_there_are_named(run):
    run.jsonl("stats").write_text("{}\n")
    assert "was not there when the run ended" in faults(run)[0]


def test_a_changed_seal_is_named(run):
    path = run.path / seal.FILE
    document = json.loads(path.read_text())
    document["files"]["metrics.jsonl"]["bytes"] = 3
    for data, said in [(json.dumps(document), "own checksum"), ("[]", "not the seal"), ("", "not the seal"),
                       (json.dumps(document | {"version": 2}), "a newer hqsweep")]:  # fmt: skip
        path.write_text(data)
        with pytest.raises(Damaged, match=said):
            seal.state(run.path)


def test_the_seal_of_another_run_is_named(run, make_runs):
    other = make_runs("quick", "quick")[1]
    shutil.copy(run.path / seal.FILE, other.path / seal.FILE)
    with pytest.raises(Damaged, match=f"is the seal of the run {run.name}"):
        seal.state(other.path)


def test_a_run_that_goes_on_has_no_seal(run):
    run.write_status(state="pending")
    assert seal.state(run.path) is None
    run.write_status(state="failed", reason="loss is nan at step 7")
    assert seal.state(run.path) is not None
    run.reset()
    assert seal.state(run.path) is None and run.status()["state"] == "pending"


def test_the_engine_takes_the_seal_of_a_failed_run_whose_config_it_writes(make_runs):
    (run,) = make_runs("quick")
    run.write_status(state="failed", reason="out of luck")
    make_runs("quick")
    assert seal.state(run.path) is None
