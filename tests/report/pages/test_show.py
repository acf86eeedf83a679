"""`show`: a screen on one run, and all of it with --all."""

import io
import json
import shutil

import pytest
from rich.console import Console

from hqsweep.report.pages.show import counted, list_sweeps, recipe_lines, show_run, show_sweep
from hqsweep.sweep.store.store import RunStore, sweep_file


def printed(renderable) -> str:
    console = Console(width=200, record=True)
    console.print(renderable)
    return console.export_text()


def test_list_counts_states(make_sweep, fake, tmp_path):
    make_sweep([fake.Run(), fake.Run(seed=1, state="failed", reason="x"), fake.Run(arm="nvfp4")], "first")
    table, sweeps = list_sweeps(RunStore(tmp_path / "runs"))
    assert (
        sweeps[0]["sweep"] == "first" and sweeps[0]["runs"] == 3 and sweeps[0]["states"] == {"finished": 2, "failed": 1}
    )
    assert sweeps[0]["arms"] == ["bf16", "nvfp4"] and json.dumps(sweeps)
    assert "first" in printed(table) and "synthetic" in shown(table)


def test_trunks_are_no_arm_and_are_counted_apart_from_forks(make_sweep, fake, tmp_path):
    runs = make_sweep(fake.fork_study({"mxfp8": 0.001}, trunks=2), "forked")
    path = tmp_path / "runs" / "forked"
    document = sweep_file.read(path)
    sweep_file.write(path, document | {"arms": ["bf16", "mxfp8"], "study": {"fork": {"at": [40, 80]}}})
    make_sweep([fake.Run()], "whole")
    table, sweeps = list_sweeps(RunStore(tmp_path / "runs"))
    counts = {sweep["sweep"]: (sweep["runs"], sweep["trunks"], sweep["forks"]) for sweep in sweeps}
    assert counts == {"forked": (10, 2, 8), "whole": (1, 0, 0)} and "2 trunks, 8 forks" in printed(table)
    assert "trunk: constant rate after 5 steps, forked at 40, 80" in printed(show_run(runs[0])[0])
    fork = printed(show_run(runs[3])[0])
    assert "fork of trunk-s0 at step 80: 20 steps at the constant rate, 20 to rate 0" in fork


def test_an_empty_store_says_what_to_do(tmp_path):
    table, sweeps = list_sweeps(RunStore(tmp_path / "none"))
    assert sweeps == [] and "no sweep in" in printed(table) and "hqsweep run" in shown(table)


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


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_arm_and_every_run_is_there_with_its_state(make_sweep, fake, width):
    runs = make_sweep([fake.Run(seed=0), fake.Run(arm="nvfp4", seed=0), fake.Run(arm="nvfp4", seed=1, state="failed",
                       reason="loss is nan at step 37", steps=120)])  # fmt: skip
    page, document = show_sweep(runs[0].sweep_path)
    console = Console(file=io.StringIO(), width=width)
    console.print(page)
    words = console.file.getvalue().split()
    assert {run.name for run in runs} <= set(words) and max(map(len, console.file.getvalue().splitlines())) <= width
    assert "loss is nan at step 37" in " ".join(words) or width < 200
    assert [(row["run"], row["arm"], row["state"]) for row in document["runs"]] == [
        (runs[0].name, "bf16", "finished"), (runs[1].name, "nvfp4", "finished"), (runs[2].name, "nvfp4", "failed"),
    ]  # fmt: skip
    assert "2 finished, 1 failed" in " ".join(words) and document["faults"] == []


def test_a_run_that_is_gone_is_named(make_sweep, fake):
    runs = make_sweep([fake.Run(seed=0), fake.Run(seed=1)])
    shutil.rmtree(runs[1].path)
    _, document = show_sweep(runs[0].sweep_path)
    assert [row["state"] for row in document["runs"]] == ["finished", "missing"]
    assert len(document["faults"]) == 1 and runs[1].name in document["faults"][0]
