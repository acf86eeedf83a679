"""`show`: a screen on one run, and all of it with --all."""

import json

import pytest
from rich.console import Console

from hqsweep.report.pages.show import counted, recipe_lines, show_run


def printed(renderable) -> str:
    console = Console(width=200, record=True)
    console.print(renderable)
    return console.export_text()


def shown(renderable, width=200) -> str:
    console = Console(width=width, record=True)
    console.print(renderable)
    return console.export_text()


def test_show_has_status_curve_worst_layers_manifest_and_config(make_sweep, fake):
    (run,) = make_sweep([fake.Run(arm="nvfp4", fmt="nvfp4", sqnr_db=20.0)])
    page, document = show_run(run, every=True)
    text = shown(page)
    assert "finished, step 200 of 200, 21 s, 8,500 tokens/s" in text and "val_loss  █" in text
    assert len(document["worst_sqnr"]) == 5 and json.dumps(document)
    worst = [row["sqnr_db"] for row in document["worst_sqnr"]]
    assert worst == sorted(worst) and max(worst) < 20 and "lowest SQNR at step 200" in text
    assert "nvfp4 x nvfp4: exact fp32 (8)" in text and "2.13.0+cpu" in text and "lr: 0.001" in text


def test_show_has_the_share_of_exact_tiles_of_projected_weights(make_sweep, fake):
    (run,) = make_sweep([fake.Run()])
    rows = [json.loads(line) for line in (run.path / "stats.jsonl").read_text().splitlines()]
    weights = [row for row in rows if row["tensor"] == "weight"]
    last = max(row["step"] for row in weights)
    for row in weights:
        row["exact_tiles_pct"] = 100.0 if row["direction"] == "rowwise" else 87.5 if row["step"] == last else 0.0
    weights[-1]["exact_tiles_pct"], layers = 50.0, len({row["layer"] for row in weights})
    (run.path / "stats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fake.seal_again(run)
    page, document = show_run(run)
    by = {share["direction"]: share for share in document["exact_tiles"]}
    assert by["rowwise"]["mean"] == by["rowwise"]["least"] == 100
    assert by["columnwise"]["mean"] == (87.5 * (layers - 1) + 50) / layers
    assert (by["columnwise"]["least"], by["columnwise"]["layer"]) == (50, weights[-1]["layer"])
    assert f"tiles exact, at least 50 % ({weights[-1]['layer']})" in shown(page)


def test_show_has_the_warnings_of_the_run(make_sweep, fake):
    (run,) = make_sweep([fake.Run()])
    run.update_manifest(warnings=["training reads its 9 tokens 2.00 times"])
    fake.seal_again(run)
    page, document = show_run(run)
    assert shown(page).count("warning: training reads its 9 tokens 2.00 times") == 1
    assert document["manifest"]["warnings"] == ["training reads its 9 tokens 2.00 times"]


def test_show_a_failed_and_a_pending_run(make_sweep, fake):
    failed, pending = make_sweep(
        [fake.Run(state="failed", reason="loss is nan at step 9", nan_from=9, steps=9), fake.Run(seed=1)]
    )
    fake.take_back(pending)
    page, document = show_run(failed)
    assert "failed: loss is nan at step 9" in shown(page) and "train_loss" in shown(page) and "!" in shown(page)
    page, document = show_run(pending)
    assert "pending" in shown(page) and document["worst_sqnr"] == [] and document["loss"]["metric"] is None


def test_a_run_fits_a_screen_of_24_lines_and_80_columns(make_sweep, fake):
    (run,) = make_sweep([fake.Run(arm="nvfp4", fmt="nvfp4", sqnr_db=20.0)])
    text = shown(show_run(run)[0], width=80)
    assert len(text.splitlines()) <= 24
    for part in ("finished, step 200", "recipe nvfp4: linear", "val_loss", "lowest SQNR", str(run.path)[:60], "--all"):
        assert part in text


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ({}, "recipe r: linear mxfp8; gemm exact"),
        (
            {"linear": {"input": "nvfp4|mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}, "gemm": "strict"},
            "recipe r: linear input and weight nvfp4|mxfp8, grad_output mxfp8; grouped_linear mxfp8; gemm strict",
        ),
        (
            {"head": {"input": "fp32"}, "overrides": [{}], "schedule": [{}]},
            "recipe r: linear mxfp8; head fp32; gemm exact; 1 override; 1 schedule",
        ),
        ({"qfactory": "mine.factory"}, "recipe r: a Python factory, mine.factory"),
    ],
)
def test_a_recipe_is_a_line(recipe, line):
    section = {"input": "mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}
    parts = {"name": "r", "linear": section, "grouped_linear": section, "dpa": {"s": "bf16"}, "head": {"input": "bf16"}}
    assert recipe_lines({**parts, "gemm": "exact", "overrides": [], "schedule": [], **recipe}) == [line]


def test_what_a_job_checked_is_counted():
    assert recipe_lines(None) == []
    assert counted("parity", [{"status": status} for status in ("PASS", "PASS", "FAIL")]) == "parity: 2 PASS, 1 FAIL"
