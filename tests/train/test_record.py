import json

import pytest

from hqsweep.train.record import (
    NotAsWritten,
    Record,
    check_recorded,
    checkpoints,
    discard,
    fault_of,
    is_point,
    mark_of,
    misfit,
    read_record,
    write_record,
)

ROWS = b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (ROWS, None),
        (ROWS + b"anything", None),
        (b"", "rows.jsonl has 0 rows, 2 were written before it"),
        (ROWS[:-1], "rows.jsonl has 1 row, 2 were written before it"),
        (ROWS.replace(b"1", b"3"), "the first 2 rows of rows.jsonl are not those that were written before it"),
        (b"\n" + ROWS, "the first 2 rows of rows.jsonl are not those that were written before it"),
    ],
)
def test_rows_against_their_mark(data, fault):
    assert misfit("rows.jsonl", data, mark_of(ROWS)) == fault


@pytest.mark.parametrize(
    "document",
    [
        [], None, 3, "x", {}, {"file": "step_1.pt"},
        {"file": "step_1.pt", "sha256": 3, "bytes": 1},
        {"file": "step_1.pt", "sha256": "", "bytes": True},
        {"file": "step_1.pt", "sha256": "", "bytes": 1, "odd": 1},
        {"file": "step_1.pt", "sha256": "", "bytes": 1, "rows": []},
        {"file": "step_1.pt", "sha256": "", "bytes": 1, "rows": {"metrics": 3}},
        {"file": "step_1.pt", "sha256": "", "bytes": 1, "rows": {"metrics": {"rows": 1, "bytes": "1", "sha256": ""}}},
        {"file": "step_1.pt", "sha256": "", "bytes": 1, "point": "yes"},
    ],
)  # fmt: skip
def test_what_is_no_record(tmp_path, document):
    (tmp_path / "step_1.json").write_text(json.dumps(document))
    with pytest.raises(NotAsWritten, match=r"/step_1\.pt: its record step_1\.json is not one$"):
        read_record(tmp_path / "step_1.pt")
    assert not is_point(tmp_path / "step_1.pt")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "half", "bytes", "deep"])
def test_a_record_that_is_no_json(tmp_path, data):
    (tmp_path / "step_1.json").write_bytes(data)
    with pytest.raises(NotAsWritten, match="is not one"):
        read_record(tmp_path / "step_1.pt")


def test_a_folder_or_nothing_instead_of_a_file(tmp_path):
    path = tmp_path / "step_1.pt"
    assert fault_of(path, "").endswith("/step_1.pt: it is not there")
    path.mkdir()
    with pytest.raises(NotAsWritten, match=r"it cannot be read \(Is a directory\)"):
        check_recorded(path)
    (path / "inside").touch()
    path.with_suffix(".json").mkdir()
    discard(path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_discarded_and_what_it_leads_to_is_not(tmp_path):
    target, path = tmp_path / "target", tmp_path / "step_1.pt"
    target.mkdir()
    path.symlink_to(target)
    discard(path)
    assert list(tmp_path.iterdir()) == [target]


def test_checkpoints_are_those_named_so(tmp_path):
    for name in ("step_10.pt", "step_9.pt", "step_x.pt", "step_-1.pt", "step_09.pt", "step_1.tmp", "step_.pt"):
        (tmp_path / name).touch()
    assert checkpoints(tmp_path) == {9: tmp_path / "step_9.pt", 10: tmp_path / "step_10.pt"}
    assert checkpoints(tmp_path / "nowhere") == {}


def test_a_file_of_another_run(tmp_path):
    path = tmp_path / "step_1.pt"
    path.write_bytes(b"")
    sha256 = mark_of(b"")["sha256"]
    write_record(path, Record(file=path.name, sha256=sha256, bytes=0, run="a", point=True))
    assert fault_of(path, "a") is None and is_point(path)
    assert fault_of(path, "b").endswith("/step_1.pt: it is one of another run")
