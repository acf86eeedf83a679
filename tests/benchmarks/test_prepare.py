"""benchmarks/prepare.py: the library alone and prepare turn the same text into tokens."""

import json
from pathlib import Path

import pytest

from benchmarks import prepare


@pytest.mark.slow
def test_a_kind_of_file_is_measured_beside_the_library(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = prepare.texts(400_000)
    tokenizer = prepare.train_tokenizer(tmp_path / "tokenizer.json", texts, vocab=400)
    words = ["--megabytes", "0.4", "--repeats", "1", "--kinds", "parquet", "--tokenizer", str(tokenizer)]
    prepare.main([*words, "--out", str(tmp_path / "rows.jsonl")])
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["case"] == "parquet" and row["megabytes"] == pytest.approx(0.4, rel=0.05)
    assert row["tokens"] > 100_000 and row["mb_s"] > 0 and row["share"] > 0 and "parquet" in capsys.readouterr().err
