"""benchmarks/converted.py: the Llama has the shape of the GPT, and every case is a row."""

import json
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import converted
from benchmarks.step import Data
from benchmarks.step_cases import SIZES
from hqsweep.models import head_loss
from hqsweep.nn.core.module import quantized_modules


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The rows of a quick call on a CPU; torch.compile gives back what it takes."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)

    def call(*words):
        file = tmp_path / "rows.jsonl"
        try:
            converted.main(["--quick", "--device", "cpu", "--turns", "1", "--out", str(file), *words])
        finally:
            capsys.readouterr()
            call.rows = [json.loads(line) for line in file.read_text().splitlines()]
        return call.rows

    return call


@pytest.mark.slow
def test_a_converted_llama_is_timed_beside_the_gpt(run):
    modes = ("compiled", "chunks", "blocks")
    rows = run("--recipes", "mxfp8", "--modes", *modes)
    cases = [(row["section"], row["mode"]) for row in rows]
    assert cases == [("gpt", "auto"), *(("plain", mode) for mode in modes), *(("converted", mode) for mode in modes)]
    for row in rows:
        assert row["ms"] > 0 and row["ktokens_s"] == pytest.approx(64 / row["ms"])
    for row in rows[4:]:
        assert row["share"] == pytest.approx(row["gpt_ms"] / row["ms"]) and "14 linear" in row["converted"]
        assert row.get("goal") == (converted.GOAL if row["mode"] in converted.JUDGED else None)
        assert row.get("pass") == (row["share"] >= converted.GOAL if row["mode"] in converted.JUDGED else None)


@pytest.mark.slow
def test_a_recipe_that_cannot_run_here_is_a_row(run):
    with pytest.raises(SystemExit):
        run("--recipes", "current_scaling:native", "--modes", "eager", "--only", "gpt")
    assert "gemm=native needs a GPU" in run.rows[0]["error"]


@pytest.mark.parametrize("name", ["quick", "S", "M"])
def test_the_llama_has_the_parameters_of_the_gpt(name):
    size = {"quick": converted.QUICK, **SIZES}[name]
    with torch.device("meta"):
        model = converted.llama(size)
    assert sum(p.numel() for p in model.parameters()) == size.parameters()


@pytest.mark.parametrize("mode", ["eager", "chunks"])
def test_a_step_trains_what_was_converted(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    data, rows = Data(converted.QUICK, "cpu"), []
    formed = head_loss.product_cross_entropy
    monkeypatch.setattr(head_loss, "product_cross_entropy", lambda *args: rows.append(args[-1]) or formed(*args))
    step = converted.LlamaStep(converted.QUICK, data, "mxfp8", mode, "cpu")
    assert len(quantized_modules(step.model)) == 14
    losses = [float(step()) for _ in range(12)]
    assert losses[-1] < losses[0]
    assert rows == [128] * 12 * (mode == "chunks")
