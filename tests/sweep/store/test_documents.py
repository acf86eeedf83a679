"""What may stand in the files of a run; everything else is named with file, place and kind."""

import datetime
import json
import math
import os
from pathlib import Path

import pytest

from hqsweep.config.jobs import TABLES
from hqsweep.errors import Damaged, Missing
from hqsweep.sweep.store.documents import SCHEMAS, Config, Manifest, Status, check_document, schema
from hqsweep.sweep.store.files import check_rows
from hqsweep.sweep.store.run_dir import PENDING, PLANNED, RunDir

PATH = Path("runs/a/b/file")
ROW = {"step": 1, "metric": "val_loss", "value": 2.5}


def test_what_the_tool_writes_may_stand_there(make_runs):
    (run,) = make_runs("quick")
    assert check_document(PATH, PENDING, Status, ("state",)) == PENDING
    assert check_document(PATH, run.manifest(), Manifest, PLANNED) == run.manifest()
    assert check_document(PATH, run.config(), Config, ("job", "seed")) == run.config()
    progress = {"step": 1, "steps": 2, "part": None, "loss": math.nan, "tokens_per_s": 3, "eta_s": None}
    check_document(PATH, PENDING | {"progress": progress, "of a later version": [1, {"a": None}]}, Status)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"state": "done"},
            "has 'done' under 'state', where one of 'failed', 'finished', 'interrupted', 'pending' or 'running'",
        ),
        ({"state": None}, "has None under 'state'"),
        ({"pid": "5"}, "has '5' under 'pid', where an integer belongs"),
        ({"attempt": True}, "has True under 'attempt', where an integer belongs"),
        ({"attempt": 2**63}, "has a number of more than 64 bits under 'attempt'"),
        ({"seconds": None}, "has None under 'seconds', where a number belongs"),
        ({"reason": "\ud800"}, r"has '\\ud800' under 'reason'"),
        ({"reason": ["x"] * 9}, "has a list of 9 under 'reason', where text belongs"),
        ({"progress": {"step": 1}}, "has no key 'progress.steps'"),
        ({"progress": {"step": 1, "steps": "2"}}, "has '2' under 'progress.steps', where an integer belongs"),
        ({"later": {"a": [1, datetime.date(2026, 1, 1)]}}, r"has datetime.date\(2026, 1, 1\) under 'later.a.1'"),
        ({"later": {3: 1}}, "has 3 as a key in 'later', where text belongs"),
        (
            {"later": {"bool": 1, "x": {"a": {1, 2}}}},
            r"has \{1, 2\} under 'later.x.a', where text, a number or null belongs",
        ),
        ({"later": {"a": -(2**63)}}, "has a number of more than 64 bits under 'later.a', where text, a number or null"),
        ({"seconds": 2**70}, "has a number of more than 64 bits under 'seconds', where a number belongs"),
        ({"later": {"a": {"\ud800": 1}}}, r"has '\\ud800' as a key in 'later.a', where text belongs"),
        ({"\ud800": 1}, r"has '\\ud800' as a key, where text belongs"),
        ({3: 1}, "has 3 as a key, where text belongs"),
    ],
)
def test_another_kind_of_value_is_named(changes, fault):
    with pytest.raises(Damaged, match=f"^runs/a/b/file: {fault}.*; the sweep's `hqsweep run` command writes it again"):
        check_document(PATH, PENDING | changes, Status, ("state",))


def test_no_mapping_and_a_key_that_lacks_are_named():
    with pytest.raises(Damaged, match="holds a list of 0 where a mapping of keys belongs"):
        check_document(PATH, [], Status)
    with pytest.raises(Damaged, match="has no key 'arm'"):
        check_document(PATH, dict.fromkeys(("run_id", "sweep"), "x"), Manifest, PLANNED)


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        ({"linear": "mxfp8"}, "has 'mxfp8' under 'recipe.linear', where a mapping"),
        ({"linear": {"input": 3}}, "has 3 under 'recipe.linear.input', where text belongs"),
        ({"schedule": ["x"]}, "has 'x' under 'recipe.schedule.0', where a mapping"),
    ],
)
def test_a_recipe_that_was_not_written_here_is_named(recipe, fault):
    with pytest.raises(Damaged, match=fault):
        check_document(PATH, {"job": "convergence", "seed": 0, "recipe": {"name": "x"} | recipe}, Config)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([], "is a list of 0, no row"),
        (ROW | {"step": None}, "has None under 'step', where an integer belongs"),
        (ROW | {"step": True}, "has True under 'step'"),
        (ROW | {"step": -(2**63)}, "has a number of more than 64 bits under 'step', which no table can hold"),
        (ROW | {"value": "2.5"}, "has '2.5' under 'value', where a number belongs"),
        (ROW | {"metric": "\udfff"}, r"has '\\udfff' under 'metric', which no table can hold"),
        ({"step": 1, "metric": "val_loss"}, "has no 'value', where a number belongs"),
    ],
)
def test_a_row_of_another_kind_is_named_with_its_line(row, fault):
    good = [ROW, ROW | {"value": math.inf}, ROW | {"value": 3}, ROW | {"value": None}]
    check_rows(PATH, good, TABLES["metrics"])
    with pytest.raises(Damaged, match=f"line 5 {fault}"):
        check_rows(PATH, [*good, row, *good], TABLES["metrics"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_describes_what_the_tool_writes(name, make_runs):
    """Without pydantic: the JSON of a run has the types that the schema states for each of its keys."""
    (run,) = make_runs("quick")
    run.job_path.write_text('{"id": "12_3"}')
    documents = {"status": PENDING, "manifest": run.manifest(), "config": run.config(), "job": {"id": "12_3"}}
    described, types = schema(name), {dict: "object", str: "string", int: "integer", list: "array", bool: "boolean"}
    assert described["type"] == "object"
    known = [key for key in documents[name] if key in described["properties"] and type(documents[name][key]) in types]
    assert known
    for key in known:
        entry = described["properties"][key]
        allowed = [each.get("type") or described["$defs"][each["$ref"].rpartition("/")[2]]["type"]
                   for each in entry.get("anyOf", [entry])]  # fmt: skip
        assert types[type(documents[name][key])] in allowed, key


def test_columns_that_earlier_versions_did_not_write_may_lack():
    stats = dict.fromkeys(TABLES["stats"], None) | {"step": 1, "layer": "a", "tensor": "x", "direction": "row"}
    check_rows(PATH, [{name: value for name, value in stats.items() if name != "load"}], TABLES["stats"])
    with pytest.raises(Damaged, match="has no 'cosine'"):
        check_rows(PATH, [{name: value for name, value in stats.items() if name != "cosine"}], TABLES["stats"])


def test_a_file_that_is_none_is_named_and_nothing_waits_for_it(make_runs, tmp_path):
    (run,) = make_runs("quick")
    for name, read in [("manifest.json", run.manifest), ("status.json", run.status), ("config.yaml", run.config),
                       ("metrics.jsonl", lambda: run.rows("metrics")), ("job.json", run.job)]:  # fmt: skip
        path = run.path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with pytest.raises(Damaged, match=f"{name}: is no file"):
            read()
        path.unlink()
        path.mkdir()
        with pytest.raises(Damaged, match=f"{name}: is no file"):
            read()
        path.rmdir()
    with pytest.raises(Missing):
        run.config()
    (tmp_path / "file").touch()
    with pytest.raises(Damaged, match="Not a directory"):
        RunDir(tmp_path / "file").config()


def test_a_document_nested_too_deep_is_named(make_runs):
    (run,) = make_runs("quick")
    for depth in (900, 100_000):
        run.manifest_path.write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(Damaged, match=r"manifest\.json"):
            run.manifest()


def test_of_a_damaged_document_nothing_is_kept_when_it_is_written_again(make_runs):
    (run,) = make_runs("quick")
    run.status_path.write_text(json.dumps(PENDING | {"attempt": "x"}))
    assert run.write_status(state="pending") == PENDING
    run.manifest_path.write_text("[]")
    run.note_repair("mended")
    assert json.loads(run.manifest_path.read_text()) == {"repairs": ["mended"]}
