"""Updates show what they change, and add draws of the same training beside those that are there."""

import json
from statistics import fmean

import pytest
from rich.console import Console

from hqsweep.errors import UserError
from hqsweep.report.gate.baseline import loss_of, read_baseline
from hqsweep.report.gate.baseline_update import update


@pytest.fixture
def stored(make_sweep, fake, tmp_path):
    """A baseline file of three arms by three seeds."""
    path = tmp_path / "baselines" / "sweep.json"
    update(make_sweep(fake.three_arms(), "stored"), path)
    return path


def losses(path):
    return {key: loss_of(entry) for key, entry in read_baseline(path).draws[-1].items()}


def test_an_update_shows_every_difference(make_sweep, fake, stored):
    old = losses(stored)
    runs = make_sweep([*fake.three_arms()[:3], fake.Run(arm="mxfp8", gap=0.5), fake.Run(arm="mxfp6")])
    change = update(runs, stored)
    rows = {(row["arm"], row["seed"]): row for row in change.rows}
    assert len(rows) == 10 and not change.refused and change.draws == 1
    bf16 = old["bf16", 0, 0]
    assert rows["bf16", 0] == {"arm": "bf16", "seed": 0, "point": 0, "stored": bf16, "now": bf16, "gap": 0.0,
                               "change": "bitwise equal"}  # fmt: skip
    assert rows["mxfp8", 0]["gap"] == rows["mxfp8", 0]["now"] - old["mxfp8", 0, 0] > 0.4
    assert rows["mxfp8", 0]["change"] == "curves differ, and so does the config"
    assert rows["mxfp6", 0]["change"] == "new" and rows["mxfp6", 0]["stored"] is None
    assert rows["nvfp4", 2]["change"] == "dropped" and rows["nvfp4", 2]["now"] is None
    assert set(read_baseline(stored).keys) == {*(("bf16", seed, 0) for seed in range(3)), ("mxfp8", 0, 0),
                                               ("mxfp6", 0, 0)}  # fmt: skip
    console = Console(width=140, record=True)
    console.print(change.table())
    shown = console.export_text()
    assert f"{old['mxfp8', 0, 0]:.6f}" in shown and "dropped" in shown and "1 draw of each run" in shown
    assert "point" not in shown


def test_an_update_names_the_formats_that_changed(make_sweep, fake, stored):
    change = update(make_sweep([fake.Run(arm="mxfp8", gap=0.005, fmt="mxfp4")]), stored)
    assert change.rows[0]["change"].endswith(
        "recipe: linear.input, linear.weight, linear.grad_output rowwise and columnwise mxfp8 -> mxfp4"
    )


def test_a_sweep_with_holes_is_refused_and_the_file_left_as_it_is(make_sweep, fake, stored):
    before = stored.read_text()
    broken = update(make_sweep([fake.Run(), fake.Run(seed=1, state="failed", reason="x")]), stored)
    assert broken.refused and broken.note == f"{stored} was not written: 1 of 2 runs have no final loss"
    assert stored.read_text() == before


def test_a_file_that_is_no_baseline_is_replaced_but_not_added_to(make_sweep, fake, tmp_path):
    path = tmp_path / "new.json"
    path.write_text("[]")
    with pytest.raises(UserError, match="not a baseline file"):
        update(make_sweep([fake.Run()]), path, add=True)
    assert path.read_text() == "[]"
    assert [row["change"] for row in update(make_sweep([fake.Run()], "again"), path).rows] == ["new"]
    assert json.loads(path.read_text())["version"] == 2


def draw_of(make_sweep, fake, stored, name, shift, **changes):
    """The same training on another machine: three arms with the stored run ids, `shift` nats away."""
    runs = [fake.Run(**vars(run) | {"gap": run.gap + shift} | changes) for run in fake.three_arms()]
    dirs = make_sweep(runs, name)
    ids = {key[:2]: entry["run_id"] for key, entry in read_baseline(stored).draws[0].items()}
    for run in dirs:
        manifest = run.manifest()
        run.update_manifest(run_id=ids[manifest["arm"], manifest["seed"]])
        fake.seal_again(run)
    return dirs


def test_draws_are_kept_side_by_side_and_their_mean_is_shown(make_sweep, fake, stored):
    first = losses(stored)
    added = update(draw_of(make_sweep, fake, stored, "second", 0.004, threads=1), stored, add=True)
    assert added.draws == 2 and "2 draws of each run" in added.note
    second = losses(stored)
    assert second != first and read_baseline(stored).sweeps == (["stored"], ["second"])
    shown = update(make_sweep(fake.three_arms(), "third"), stored, add=True)
    assert shown.draws == 2 and not shown.refused and "has these draws already" in shown.note
    row = next(row for row in shown.rows if (row["arm"], row["seed"]) == ("mxfp8", 1))
    assert row["stored"] == fmean([first["mxfp8", 1, 0], second["mxfp8", 1, 0]]) and row["change"] == "bitwise equal"


def test_another_training_is_no_draw(make_sweep, fake, stored):
    before = stored.read_text()
    with pytest.raises(UserError, match="none of these runs is stored there"):
        update(make_sweep(fake.fork_study({"mxfp8": 0.1}), "forks"), stored, add=True)
    with pytest.raises(UserError, match=r"'mxfp8' was stored with another config \(linear.input.* mxfp8 -> mxfp4\)"):
        update(make_sweep([fake.Run(arm="mxfp8", gap=0.002, fmt="mxfp4")]), stored, add=True)
    assert stored.read_text() == before
