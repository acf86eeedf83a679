"""benchmarks/nonfinite.py: the case without counting notes nothing, the other one does."""

import json

import pytest
import torch

from benchmarks import nonfinite, step
from benchmarks.step_floors import Size
from hqsweep.config.model import ModelConfig

TINY = Size(model=ModelConfig(dim=64, layers=1, heads=2), batch=2, context=32, vocabulary=96, turn=1)


def test_only_the_counted_case_notes_a_nan():
    for kind, met in ((step.Ours, True), (nonfinite.Uncounted, False)):
        case = kind(TINY, step.Data(TINY, "cpu"), "mxfp4", "off", "cpu")
        case.trainer.model.layers[0].mlp.fc1.weight.detach()[0, 3] = torch.nan
        case()
        case.trainer.nonfinite.read()
        assert bool(case.trainer.nonfinite.met) == met


@pytest.mark.slow
def test_a_row_has_both_times(monkeypatch, tmp_path):
    monkeypatch.setattr(nonfinite, "SIZES", {"S": TINY})
    words = ["--device", "cpu", "--size", "S", "--recipes", "nvfp4", "--modes", "off", "--turns", "1"]
    nonfinite.main([*words, "--out", str(tmp_path / "rows")])
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["cost_pct"] == 100 * (row["counted_ms"] / row["uncounted_ms"] - 1)
