"""benchmarks/ranks.py on two gloo ranks and a tiny shape: every case is a row, and one rank stands beside."""

import json

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_every_case_is_a_row(tmp_path):
    from benchmarks import ranks  # compiles a function, which imports TorchInductor

    words = ["--quick", "--device", "cpu", "--ranks", "2", "--turns", "1", "--recipes", "mxfp8:held", "--ep"]
    ranks.main([*words, "--out", str(tmp_path / "rows.jsonl"), "--commit", "none"])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["section"], row.get("recipe"), row["ranks"]) for row in rows] == [
        ("time", None, 1), ("time", "mxfp8:held", 1), ("sharded", None, 1), ("sharded", "mxfp8:held", 1),
        ("ep", "mxfp8:held", 1), ("wire", None, 2), ("time", None, 2), ("time", "mxfp8:held", 2),
        ("ep", "mxfp8:held", 2), ("ep", "mxfp8:held", 2),
    ]  # fmt: skip
    assert {row["case"] for row in rows if row["section"] == "time" and "recipe" not in row} == {"torch eager"}
    alone, sharded, over = rows[1], rows[3], rows[7]
    assert [row["case"] for row in rows if row["section"] == "ep"] == ["hqsweep", "waits", "room"]
    assert sharded["pass"] == (sharded["share"] >= 1) and "scaling" not in sharded
    assert over["scaling"] == pytest.approx(alone["ms"] / over["ms"])
    assert over["ktokens_s"] == pytest.approx(2 * 64 / over["ms"])
    assert over["pass"] == (over["share"] >= 1 and over["scaling"] >= 0.93)
