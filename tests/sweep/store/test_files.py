import json
import math

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.store.files import drop_torn_tail, encode_rows, read_json, read_rows, write_json


def test_a_failed_write_leaves_the_old_document_and_no_temporary_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_reading_a_missing_document_gives_the_default_and_a_broken_one_is_named(tmp_path):
    assert read_json(tmp_path / "none.json", {"x": 1}) == {"x": 1}
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json: is not JSON"):
        read_json(tmp_path / "bad.json")


def test_every_prefix_of_a_row_file_reads_as_its_whole_lines(tmp_path):
    rows = [{"step": 1, "value": 0.5}, {"step": 2, "value": math.inf}, {"step": 3, "value": -2.0}]
    data = encode_rows(rows)
    for length in range(len(data) + 1):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert read_rows(path) == rows[:whole]
        drop_torn_tail(path)
        with path.open("ab") as file:
            file.write(encode_rows([{"step": 9, "value": 0.0}]))
        assert [row["step"] for row in read_rows(path)] == [*[1, 2, 3][:whole], 9]


def test_nan_and_infinities_survive():
    row = json.loads(encode_rows([{"a": math.nan, "b": -math.inf}]))
    assert math.isnan(row["a"]) and row["b"] == -math.inf


def test_a_broken_line_inside_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl: line 2 is not JSON"):
        read_rows(tmp_path / "rows.jsonl")


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
