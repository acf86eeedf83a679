"""The figure of loads: layer by expert, for arms that have experts."""

from types import SimpleNamespace

import pandas as pd

from hqsweep.report.experts import load_heatmaps


def comparison(rows):
    stats = pd.DataFrame(rows, columns=["arm", "layer", "tensor", "load"])
    return SimpleNamespace(frames=SimpleNamespace(stats=stats), arms=pd.DataFrame({"arm": ["dense", "moe"]}))


def test_loads_are_drawn_layer_by_expert_in_order():
    rows = [("moe", f"layers.{i}.mlp.{e}", "routed", i + e / 10) for i in (0, 1) for e in (10, 2)]
    rows += [("moe", "layers.0.mlp.2", "routed", 0.4), ("dense", "head", "input", None)]
    (panel,) = load_heatmaps(comparison(rows))
    figure = panel.figure
    assert panel.heading == "moe" and list(figure.data[0].x) == ["2", "10"]
    assert list(figure.data[0].y) == ["layers.0.mlp", "layers.1.mlp"]
    assert figure.data[0].z.tolist() == [[(0.2 + 0.4) / 2, 1.0], [1.2, 2.0]]
    assert panel.rows["load"].tolist() == [1.0, (0.2 + 0.4) / 2, 2.0, 1.2] and "expert 10 2" in panel.says


def test_dense_models_have_none():
    assert list(load_heatmaps(comparison([("dense", "head", "input", None)]))) == []
    assert list(load_heatmaps(comparison([]))) == []
