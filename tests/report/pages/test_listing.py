"""`ls`: a table and the same sweeps as JSON."""

import json

from rich.console import Console

from hqsweep.report.pages.listing import list_sweeps
from hqsweep.report.pages.show import show_run
from hqsweep.sweep.store.store import RunStore, sweep_file


def shown(renderable) -> str:
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
    assert "first" in shown(table) and "synthetic" in shown(table)


def test_trunks_are_no_arm_and_are_counted_apart_from_forks(make_sweep, fake, tmp_path):
    runs = make_sweep(fake.fork_study({"mxfp8": 0.001}, trunks=2), "forked")
    path = tmp_path / "runs" / "forked"
    document = sweep_file.read(path)
    sweep_file.write(path, document | {"arms": ["bf16", "mxfp8"], "study": {"fork": {"at": [40, 80]}}})
    make_sweep([fake.Run()], "whole")
    table, sweeps = list_sweeps(RunStore(tmp_path / "runs"))
    counts = {sweep["sweep"]: (sweep["runs"], sweep["trunks"], sweep["forks"]) for sweep in sweeps}
    assert counts == {"forked": (10, 2, 8), "whole": (1, 0, 0)} and "2 trunks, 8 forks" in shown(table)
    assert "trunk: constant rate after 5 steps, forked at 40, 80" in shown(show_run(runs[0])[0])
    fork = shown(show_run(runs[3])[0])
    assert "fork of trunk-s0 at step 80: 20 steps at the constant rate, 20 to rate 0" in fork


def test_an_empty_store_says_what_to_do(tmp_path):
    table, sweeps = list_sweeps(RunStore(tmp_path / "none"))
    assert sweeps == [] and "no sweep in" in shown(table) and "hqsweep run" in shown(table)
