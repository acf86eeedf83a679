"""`hqsweep ls` and `hqsweep show SWEEP`."""

import io
import json
import shutil

import pytest
from rich.console import Console

from hqsweep.report.pages.show import show_run
from hqsweep.report.pages.sweeps import list_sweeps, show_sweep
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
    assert "first" in printed(table) and "synthetic" in printed(table)


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
    assert sweeps == [] and "no sweep in" in printed(table) and "hqsweep run" in printed(table)


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
