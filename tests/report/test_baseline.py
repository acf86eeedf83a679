"""The baseline file: exact losses, what they depend on, and updates that show what they change."""

import json

import pytest
from rich.console import Console

from hqsweep.report.baseline import update


@pytest.fixture
def stored(make_sweep, fake, tmp_path):
    """A baseline file of three arms by three seeds."""
    path = tmp_path / "baselines" / "sweep.json"
    update(make_sweep(fake.three_arms(), "stored"), path)
    return path


def test_losses_are_hex_floats_beside_what_they_depend_on(stored):
    entry = json.loads(stored.read_text())["runs"][0]
    assert float.fromhex(entry["final_loss"]).hex() == entry["final_loss"]
    assert entry["fingerprint"] == {
        "device": "cpu", "threads": "2", "isa": "avx2", "versions.torch": "2.13.0+cpu",
        "kernel_build": "-O3 -ffp-contract=off", "data_hash": "9f" * 8,
    }  # fmt: skip


def test_an_update_shows_every_difference(make_sweep, fake, stored):
    old = {(e["arm"], e["seed"]): float.fromhex(e["final_loss"]) for e in json.loads(stored.read_text())["runs"]}
    runs = make_sweep([*fake.three_arms()[:3], fake.Run(arm="mxfp8", gap=0.5), fake.Run(arm="mxfp6")])
    change = update(runs, stored)
    rows = {(row["arm"], row["seed"]): row for row in change.rows}
    assert len(rows) == 10 and change.refused is None
    assert rows["bf16", 0] == {"arm": "bf16", "seed": 0, "stored": old["bf16", 0], "now": old["bf16", 0], "gap": 0.0,
                               "change": "bitwise equal"}  # fmt: skip
    assert rows["mxfp8", 0]["gap"] == rows["mxfp8", 0]["now"] - old["mxfp8", 0] > 0.4
    assert rows["mxfp8", 0]["change"] == "curves differ, and so does the config"
    assert rows["mxfp6", 0]["change"] == "new" and rows["mxfp6", 0]["stored"] is None
    assert rows["nvfp4", 2]["change"] == "dropped" and rows["nvfp4", 2]["now"] is None
    assert {(e["arm"], e["seed"]) for e in json.loads(stored.read_text())["runs"]} == {
        *(("bf16", seed) for seed in range(3)), ("mxfp8", 0), ("mxfp6", 0),
    }  # fmt: skip
    console = Console(width=140, record=True)
    console.print(change.table())
    shown = console.export_text()
    assert f"{old['mxfp8', 0]:.6f}" in shown and "dropped" in shown and "stored " in shown


def test_a_sweep_with_holes_is_refused_and_the_file_left_as_it_is(make_sweep, fake, stored):
    before = stored.read_text()
    broken = update(make_sweep([fake.Run(), fake.Run(seed=1, state="failed", reason="x")]), stored)
    assert broken.refused == f"{stored} was not written: 1 of 2 runs have no final loss"
    assert stored.read_text() == before


def test_a_file_that_is_no_baseline_is_replaced(make_sweep, fake, tmp_path):
    path = tmp_path / "new.json"
    path.write_text("[]")
    assert [row["change"] for row in update(make_sweep([fake.Run()]), path).rows] == ["new"]
    assert json.loads(path.read_text())["version"] == 1
