"""Runs on other data than their baseline's: left out and named, whoever compares, stores or counts them."""

import json
import math
from dataclasses import replace

import pytest

from hqsweep.errors import EXIT_FAILED, Damaged, UserError
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import load
from hqsweep.report.compare.left_out import exit_code
from hqsweep.report.gate.baseline_update import update
from hqsweep.report.gate.gate import gate

OLD, NEW = "a" * 64, "b" * 64


def mixed(fake, **data):
    """three_arms with the data of some arms changed: {arm: hash}."""
    return [replace(run, data=data.get(run.arm, OLD)) for run in fake.three_arms()]


def states(comparison) -> dict[str, str]:
    return {entry.run.split("/")[1].split("-s")[0]: entry.state for entry in comparison.left_out}


def test_an_arm_on_other_data_is_left_out_named_and_pairs_with_nothing(make_sweep, fake):
    comparison = compare(make_sweep(mixed(fake, nvfp4=NEW)))
    assert list(comparison.arms["arm"]) == ["bf16", "mxfp8"] and set(comparison.points["arm"]) == {"mxfp8"}
    assert states(comparison) == {"nvfp4": "of other data"} and len(comparison.left_out) == 3
    line = comparison.left_out[0].line
    assert line.startswith("sweep/nvfp4-s0-") and "says data_hash bbbbbbbbbb, and 'bf16' has read aaaaaaaaaa; " in line
    assert comparison.notes[0].startswith("Left out, 3 runs: sweep/nvfp4-s0-")
    assert exit_code(comparison.left_out, partial=False) == exit_code(comparison.left_out, partial=True) == EXIT_FAILED


def test_a_seed_on_other_data_leaves_the_seeds_on_the_same(make_sweep, fake):
    runs = [replace(run, data=NEW if run.seed == 2 else OLD) for run in fake.three_arms()]
    comparison = compare(make_sweep(runs))
    assert len(comparison.left_out) == 3 and set(comparison.arms["n"][1:]) == {2}
    assert set(comparison.finals["seed"]) == {0, 1}


def test_the_data_are_those_of_the_baseline_that_is_asked_for(make_sweep, fake):
    runs = make_sweep(mixed(fake, nvfp4=NEW))
    assert states(compare(runs, baseline="nvfp4")) == {"bf16": "of other data", "mxfp8": "of other data"}


@pytest.mark.parametrize(("bf16", "nvfp4"), [(OLD, None), (None, NEW)])
def test_data_that_are_known_of_one_side_alone_are_of_unknown_data(make_sweep, fake, bf16, nvfp4):
    comparison = compare(make_sweep(mixed(fake, bf16=bf16, mxfp8=bf16, nvfp4=nvfp4)))
    assert states(comparison) == {"nvfp4": "of unknown data"}


def test_runs_of_which_nothing_says_the_data_are_compared_and_it_is_said(make_sweep, fake):
    comparison = compare(make_sweep(mixed(fake, **dict.fromkeys(("bf16", "mxfp8", "nvfp4")))))
    assert not comparison.left_out and set(comparison.arms["n"][1:]) == {3}
    assert any(note.startswith("It is not known which data these runs have read") for note in comparison.notes)
    assert not any("which data" in note for note in compare(make_sweep(fake.three_arms(), "known")).notes)


def test_a_run_that_has_not_begun_is_unfinished_and_not_of_unknown_data(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    fake.take_back(runs[-1])
    runs[-1].update_manifest(data_hash=None)
    (entry,) = compare(runs).left_out
    assert entry.state == "pending"


def test_sweeps_on_two_data_are_told_apart_and_no_run_stands_for_another(make_sweep, fake):
    """Their configs are equal, and so are the ids of runs of earlier versions."""
    runs = make_sweep(mixed(fake), "old") + make_sweep(mixed(fake, bf16=NEW, mxfp8=NEW, nvfp4=NEW), "new")
    for run, twin in zip(runs[:9], runs[9:], strict=True):
        twin.update_manifest(run_id=run.manifest()["run_id"])
        fake.seal_again(twin)
    assert len(load(runs).runs) == 18
    comparison = compare(runs)
    assert comparison.baseline_of["nvfp4 data.hash=bbbbbbbbbb"] == "bf16 data.hash=bbbbbbbbbb"
    assert set(comparison.arms["n"][comparison.arms["arm"] != comparison.arms["baseline"]]) == {3}


def test_forks_on_other_data_and_those_of_a_trunk_on_other_data_are_left_out(make_sweep, fake):
    study = [replace(run, data=OLD) for run in fake.fork_study({"mxfp8": 0.001, "nvfp4": 0.02})]

    def changed(name: str, *seeds: int, arm: str = "trunk"):
        """The study with other data of these runs, its forks named after their trunks."""
        runs = [replace(run, data=NEW) if run.arm == arm and run.seed in seeds else run for run in study]
        trunks = {run.seed: run for run in runs if run.arm == "trunk"}
        names = {seed: make_sweep([run], f"{name}-{seed}")[0].name for seed, run in trunks.items()}
        return make_sweep([replace(run, trunk=names[run.seed]) if run.trunk else run for run in runs], name)

    comparison = compare(changed("arm", 0, 1, 2, 3, arm="nvfp4"))
    assert states(comparison) == {"nvfp4": "of other data"} and set(comparison.points["arm"]) == {"mxfp8"}
    comparison = compare(changed("trunk", 3))
    assert states(comparison) == dict.fromkeys(("bf16", "mxfp8", "nvfp4"), "of other data")  # its trunk is bf16 too
    assert set(comparison.points["seed"]) == {0, 1, 2} and len(comparison.left_out) == 1 + 3 * 2
    assert "and its trunk has read bbbbbbbbbb" in comparison.left_out[-1].line
    with pytest.raises(Damaged, match="so no run is left to compare"):
        compare(changed("trunks", 0, 1, 2, 3))


@pytest.fixture
def stored(make_sweep, fake, tmp_path):
    path = tmp_path / "baseline.json"
    assert not update(make_sweep(mixed(fake), "stored"), path).refused
    return path


def test_the_gate_holds_no_run_against_one_on_other_data(make_sweep, fake, stored):
    verdicts = gate(make_sweep(mixed(fake, **dict.fromkeys(("bf16", "mxfp8", "nvfp4"), NEW))), stored)
    assert verdicts.exit_code == EXIT_FAILED and len(verdicts.left_out) == 9
    assert all(arm.verdict is None and math.isnan(arm.gap) and not arm.bitwise for arm in verdicts.arms)
    assert "seed 0 has read other data than what is stored of it" in verdicts.arms[0].note
    assert "says data_hash bbbbbbbbbb, and baseline.json has aaaaaaaaaa" in verdicts.left_out[0].line
    assert gate(make_sweep(mixed(fake), "again"), stored).exit_code == 0


def test_the_gate_leaves_out_an_arm_on_other_data_than_its_baseline_arm(make_sweep, fake, stored):
    verdicts = gate(make_sweep(mixed(fake, nvfp4=NEW)), stored)
    outcomes = {arm.arm: arm.outcome for arm in verdicts.arms}
    assert outcomes == {"bf16": "pass", "mxfp8": "pass", "nvfp4": "missing"}
    assert verdicts.exit_code == EXIT_FAILED and len(verdicts.left_out) == 3


def test_a_baseline_takes_neither_mixed_runs_nor_a_draw_on_other_data(make_sweep, fake, stored):
    before = stored.read_bytes()
    refused = update(make_sweep(mixed(fake, nvfp4=NEW), "mixed"), stored)
    assert refused.refused and "is of other data" in refused.note and stored.read_bytes() == before
    everywhere = mixed(fake, **dict.fromkeys(("bf16", "mxfp8", "nvfp4"), NEW))
    with pytest.raises(UserError, match="'bf16' was stored with other data"):
        update(make_sweep(everywhere, "draw"), stored, add=True)
    assert stored.read_bytes() == before
    replaced = update(make_sweep(everywhere, "new"), stored)
    assert {row["change"] for row in replaced.rows} == {"other data: aaaaaaaaaa -> bbbbbbbbbb"}
    assert all(row["gap"] is None for row in replaced.rows)
    document = json.loads(stored.read_text())
    assert {run["fingerprint"]["data_hash"] for run in document["draws"][0]["runs"]} == {NEW}
