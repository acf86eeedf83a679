"""Experts in the report: loads, errors by expert, and the tables of the worst; for arms that have experts."""

import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest

from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import by_module
from hqsweep.report.figures import experts, heatmaps, lines
from hqsweep.report.figures.experts import (
    error_rows,
    load_heatmaps,
    load_rows,
    load_table,
    worst_experts,
)
from hqsweep.report.pages.folder import write

COLUMNS = [
    "arm",
    "seed",
    "step",
    "layer",
    "tensor",
    "direction",
    "format",
    "sqnr_db",
    "underflow_pct",
    "cosine",
    "tokens",
    "load",
]


def drawn(compared):
    """The heatmaps of SQNR and those of underflow."""
    return list(experts.sqnr_heatmaps(compared)), list(experts.underflow_heatmaps(compared))


def comparison(rows):
    """A comparison with these statistics, dicts of some of COLUMNS."""
    stats = pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(COLUMNS[7:], "float64"))
    arms = pd.DataFrame({"arm": ["dense", "moe"], "baseline": "dense", "null": False})
    return SimpleNamespace(frames=SimpleNamespace(stats=stats), arms=arms)


def routed(expert, load, layer=0, arm="moe", seed=0):
    slot = {"layer": f"layers.{layer}.mlp.{expert}", "tensor": "routed", "direction": "output"}
    return {"arm": arm, "seed": seed, "step": 80, **slot, "tokens": 100 * load, "load": load}


def operand(expert, sqnr_db, underflow_pct=0.0, layer="layers.0.mlp.fc1", **slot):
    """A row of statistics; of a dense linear where expert is None."""
    name = layer if expert is None else f"{layer}.{expert}"
    defaults = {"arm": "moe", "tensor": "input", "direction": "rowwise", "format": "nvfp4"}
    return defaults | slot | {"layer": name, "sqnr_db": sqnr_db, "underflow_pct": underflow_pct}


DENSE = operand(None, 30.0, layer="head", arm="dense")


def test_loads_are_drawn_layer_by_expert_in_order():
    rows = [routed(e, i + e / 10, layer=i) for i in (0, 1) for e in (10, 2)]
    rows += [routed(2, 0.4), DENSE]
    compared = comparison(rows)
    (panel,) = load_heatmaps(compared)
    figure = panel.figure
    assert panel.heading == "moe" and list(figure.data[0].x) == ["2", "10"]
    assert list(figure.data[0].y) == ["layers.0.mlp", "layers.1.mlp"]
    assert figure.data[0].z.tolist() == [[(0.2 + 0.4) / 2, 1.0], [1.2, 2.0]]
    assert panel.rows["load"].tolist() == [1.0, (0.2 + 0.4) / 2, 2.0, 1.2] and "expert 10 2" in panel.says
    assert panel.rows["tokens"].tolist() == pytest.approx([100, 30, 200, 120])


def test_an_idle_expert_of_one_seed_is_in_the_table_though_no_median_has_it():
    rows = [routed(e, 0.1 if e == seed else 1.3, seed=seed, layer=1) for seed in range(3) for e in range(3)]
    compared = comparison([*rows, routed(2, 1.4, layer=1, seed=1), DENSE])
    assert load_rows(compared)["load"].tolist() == pytest.approx([1.3] * 3)
    busiest, idlest = ("1.40", "140", "layers.1.mlp.2", "1, 80"), ("0.10", "10", "layers.1.mlp.0", "0, 80")
    assert load_table(compared).rows == (("moe", *busiest, *idlest),)


def test_dense_models_have_none():
    for rows in ([DENSE], []):
        compared = comparison(rows)
        assert list(load_heatmaps(compared)) == [] and drawn(compared) == ([], [])
        assert worst_experts(compared).rows == load_table(compared).rows == ()


def test_experts_in_high_precision_have_loads_and_no_errors():
    compared = comparison([routed(0, 1.0), *(operand(e, math.inf, format="bf16") for e in (0, 1))])
    assert len(list(load_heatmaps(compared))) == len(load_table(compared).rows) == 1
    assert drawn(compared) == ([], []) and worst_experts(compared).rows == () and error_rows(compared).empty


def test_a_layer_that_ends_in_a_number_is_an_expert():
    named = by_module(pd.DataFrame({"layer": ["layers.0.mlp.fc1.13", "layers.0.attn.qkv", "head"]}))
    assert named["module"].tolist() == ["layers.0.mlp.fc1", "layers.0.attn.qkv", "head"]
    assert named["expert"].tolist()[0] == 13 and named["expert"].isna().tolist() == [False, True, True]


@pytest.mark.feature("H34")
def test_errors_are_drawn_by_expert_with_lines_in_forward_order():
    """Medians of 10 and 14 dB; expert 1 of fc2 got no token; an arm with all experts in bf16 has no figure."""
    rows = [operand(e, db, share, tensor=tensor, direction=direction)
            for tensor, direction in (("grad_output", "columnwise"), ("input", "rowwise"))
            for e, db, share in ((0, 10.0, 4.0), (0, 14.0, 2.0), (1, 20.0 + len(tensor), 0.0))]  # fmt: skip
    rows += [operand(0, 31.0, layer="layers.0.mlp.fc2", format="mxfp8"), DENSE]
    rows += [operand(e, math.inf, arm="dense", format="bf16") for e in (0, 1)]
    compared = comparison([*rows, routed(0, 1.5), routed(1, 0.5)])
    (sqnr,), (underflow,) = drawn(compared)
    compared = sqnr.figure.data[0]
    assert sqnr.heading == "moe" and list(compared.x) == ["0", "1"]
    assert list(compared.y) == ["layers.0.mlp.fc1 input row", "layers.0.mlp.fc1 grad col", "layers.0.mlp.fc2 input row"]
    assert compared.z[:2].tolist() == [[12, 25], [12, 31]] and compared.z[2][0] == 31 and math.isnan(compared.z[2][1])
    assert list(compared.text[2]) == ["31", ""] and compared.customdata[2][0] == "mxfp8"
    assert "lowest: layers.0.mlp.fc1 expert 0 input rowwise 12" in sqnr.says
    assert underflow.figure.data[0].z.tolist() == [[3, 0], [3, 0], [0, pytest.approx(math.nan, nan_ok=True)]]
    csv = sqnr.rows.set_index(["module", "tensor", "expert"])
    assert csv.loc[("layers.0.mlp.fc1", "input", 0), ["sqnr_db", "tokens", "load"]].tolist() == [12, 150, 1.5]


@pytest.mark.feature("H34")
def test_the_worst_expert_of_each_tensor_is_told_beside_the_others():
    rows = [operand(e, 20.0 + e, e / 2, tensor=tensor) for tensor in ("input", "weight") for e in range(3)]
    rows += [operand(2, 19.5, 7.0, tensor="weight", direction="columnwise", format="mxfp8")]
    compared = comparison([*rows, routed(0, 0.25), routed(2, 2.0)])
    assert worst_experts(compared).rows == (
        ("moe", "input", "20.0", "layers.0.mlp.fc1.0", "rowwise", "nvfp4", "21.0", "25", "0.25", "1.00",
         "layers.0.mlp.fc1.2", "rowwise"),
        ("moe", "weight", "19.5", "layers.0.mlp.fc1.2", "columnwise", "mxfp8", "19.5", "200", "2.00", "7.00",
         "layers.0.mlp.fc1.2", "columnwise"),
    )  # fmt: skip


def test_heatmaps_and_cosines_of_layers_take_experts_together():
    rows = [operand(e, 20.0 + e) for e in range(3)] + [DENSE]
    outputs = [operand(e, 20.0, tensor="wgrad", direction="output") | {"cosine": 0.9 + e / 100} for e in range(3)]
    compared = comparison([*rows, *outputs, routed(0, 1.0)])
    rows = heatmaps.error_rows(compared)
    assert rows[["layer", "sqnr_db"]].values.tolist() == [["head", 30.0], ["layers.0.mlp.fc1", 21.0]]
    (wgrad,) = lines.gradient_cosines(compared)
    assert wgrad.rows["layer"].tolist() == ["layers.0.mlp.fc1"]
    assert wgrad.rows[["median_cosine", "lowest_cosine"]].values.tolist() == [[0.91, 0.9]]


def test_many_experts_are_colours_without_numbers():
    rows = [operand(e, 20.0 + e) for e in range(40)] + [routed(e, 1.0) for e in range(40)]
    (sqnr,), _ = drawn(comparison(rows))
    (load,) = load_heatmaps(comparison(rows))
    for panel in (sqnr, load):
        assert panel.figure.data[0].texttemplate is None and panel.figure.data[0].showscale


def trained(recipe, workspace):
    """The rows of two steps of a GPT with 3 experts in its one layer."""
    sink = ListSink()
    config = {
        "job": "convergence", "sweep": "sweep", "recipe": {"name": recipe, "linear": recipe}, "stats": {"every": 1},
        "model": {"dim": 32, "layers": 1, "heads": 2, "experts": 3},
        "data": {"source": "markov", "markov": {"length": 2000}},
        "train": {"steps": 2, "batch": 2, "context": 32, "eval_batches": 1, "log_every": 1, "eval_every": 1,
                  "device": "cpu"},
    }  # fmt: skip
    convergence.run(parse(config), sink, workspace)
    return sink


@pytest.mark.slow
@pytest.mark.feature("H34")
def test_a_training_run_reaches_the_figures_and_the_pages(make_sweep, fake, tmp_path):
    """All that is known of every expert: SQNR, underflow, tokens, load; and the balance over steps."""
    folders = make_sweep([fake.Run(arm=recipe, fmt=recipe) for recipe in ("bf16", "nvfp4")])
    for folder, recipe in zip(folders, ("bf16", "nvfp4"), strict=True):
        sink = trained(recipe, tmp_path / "trained" / recipe)
        for table, rows in (("metrics", sink.metrics), ("stats", sink.tables["stats"])):
            folder.jsonl(table).write_text("".join(json.dumps(row) + "\n" for row in rows))
        fake.seal_again(folder)
    compared = compare(folders, "bf16")
    rows, loads = error_rows(compared), load_rows(compared)
    assert set(rows["arm"]) == {"nvfp4"} and set(rows["module"]) == {"layers.0.mlp.fc1", "layers.0.mlp.fc2"}
    assert set(rows["tensor"]) == set(experts.TENSORS) and set(rows["direction"]) == {"rowwise", "columnwise"}
    assert len(rows) == 2 * 3 * 2 * 3 and rows["sqnr_db"].between(5, 40).all()
    assert rows["underflow_pct"].between(0, 60).all() and (rows["underflow_pct"] > 0).any()
    assert len(loads) == 2 * 3 and loads["tokens"].between(1, 64).all() and loads["load"].between(0.01, 3).all()
    assert rows["tokens"].notna().all() and set(rows["tokens"]) <= set(loads["tokens"])
    page = write(compared, tmp_path / "out")
    text, pages = page.with_suffix(".md").read_text(), page.read_text()
    for heading in ("Experts: lowest SQNR and highest underflow", "Experts: highest and lowest load"):
        assert f"## {heading}\n" in text and heading in pages
    assert "Expert SQNR by layer" in pages and "Greatest load of any expert" in pages
    for name in ("expert_error", "expert_load", "expert_load_max", "aux_loss"):
        assert len(pd.read_csv(page.parent / "figures" / f"{name}.csv")) > 0
