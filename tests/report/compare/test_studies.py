"""What a sweep states about its comparison is what counts, unless something is given."""

import json
import math
from dataclasses import replace

import pytest

from hqsweep.config.study import StudyConfig
from hqsweep.errors import EXIT_FAILED, Damaged, UserError
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import load
from hqsweep.report.compare.left_out import exit_code
from hqsweep.report.compare.studies import study_of
from hqsweep.report.gate.baseline_update import update
from hqsweep.report.gate.gate import gate
from hqsweep.sweep.store import sweep_file


def stating(make_sweep, runs, name="sweep", **study):
    """A sweep whose sweep.json has these keys of StudyConfig."""
    run_dirs = make_sweep(runs, name)
    path = run_dirs[0].sweep_path
    keys = StudyConfig.model_validate(study).model_dump(mode="json")
    sweep_file.write(path, sweep_file.read(path) | {"study": keys})
    return run_dirs


def test_the_sweep_says_baseline_and_margin_and_the_call_overrides_them(make_sweep, fake):
    runs = stating(make_sweep, fake.three_arms(), baseline="mxfp8", margin="0.5%")
    comparison = compare(runs)
    assert comparison.baseline == "mxfp8" and comparison.margin_pct == 0.5
    assert comparison.estimates["nvfp4"].margin == 0.5
    overridden = compare(runs, "bf16", margin="0.1%")
    assert overridden.baseline == "bf16" and overridden.margin_pct == 0.1


def test_without_a_word_it_is_bf16_else_the_first_arm_and_a_quarter_of_a_percent(make_sweep, fake):
    assert compare(make_sweep(fake.three_arms())).baseline == "bf16"
    others = compare(make_sweep([run for run in fake.three_arms() if run.arm != "bf16"], "others"))
    assert others.baseline == "mxfp8" and others.margin_pct == 0.25 and others.maximum is None


def test_sweeps_that_state_different_margins_ask_for_one(make_sweep, fake):
    one = stating(make_sweep, [fake.Run(seed=0), fake.Run(arm="nvfp4", seed=0, gap=0.1)], "one", margin=0.5)
    two = stating(make_sweep, [fake.Run(seed=1), fake.Run(arm="nvfp4", seed=1, gap=0.1)], "two", margin=1)
    with pytest.raises(UserError, match=r"margin: the sweeps state different ones \(one 0.5, two 1.0\); give --margin"):
        compare([*one, *two])
    assert compare([*one, *two], margin=0.5).arms["n"].max() == 2


@pytest.mark.parametrize("margin", [0, "0%", -1, 100.5, "101%", "small", float("nan"), True])
def test_a_margin_that_is_none_is_refused(make_sweep, fake, margin):
    with pytest.raises(UserError, match=r"margin: got .*above 0 and at most 100"):
        compare(make_sweep(fake.three_arms()), margin=margin)


def test_a_run_folder_without_its_sweep_has_the_defaults(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    (runs[0].sweep_path / "sweep.json").unlink()
    assert study_of(runs).margin == 0.25 and study_of(runs).baseline is None


def test_a_study_that_grows_until_decided_is_judged_at_the_levels_of_its_looks(make_sweep, fake):
    """Three seeds of at most eight: the interval is that of t at a two-sided level of .00412 instead of .05."""
    gaps = (0.020, 0.026, 0.021)
    runs = [fake.Run(seed=s, final=2.0) for s in range(3)]
    runs += [fake.Run(arm="nvfp4", seed=s, final=2 + gap) for s, gap in enumerate(gaps)]
    growing = stating(make_sweep, runs, seeds={"until": "decided", "max": 8})
    comparison, fixed = compare(growing), compare(make_sweep(runs, "fixed"))
    half, narrow = (each.arms.set_index("arm").at["nvfp4", "half_pct"] for each in (comparison, fixed))
    assert comparison.maximum == 8 and half / narrow == pytest.approx(15.52 / 4.3027, rel=0.03)
    assert "Looked at after every seed, 8 at most" in " ".join(comparison.notes)
    assert [each.arms["verdict"].iloc[1] for each in (comparison, fixed)] == ["undecided", "worse"]


def minutes(comparison):
    return set(comparison.arms["replicate_minutes"])


def test_a_seed_costs_a_run_of_every_arm(make_sweep, fake):
    runs = [fake.Run(seed=s, seconds=60) for s in (0, 1)] + [fake.Run(arm="a", seed=s, seconds=180) for s in (0, 1)]
    assert minutes(compare(make_sweep(runs))) == {4.0}


def test_a_trunk_costs_itself_and_its_forks_by_the_workers(make_sweep, fake):
    runs = fake.fork_study({"null": 0.0, "mxfp8": 0.001}, trunks=3, seconds=30.0, workers=2)
    runs = [fake.Run(**vars(run) | {"seconds": 240.0}) if run.arm == "trunk" else run for run in runs]
    assert minutes(compare(make_sweep(runs))) == {3.5}  # (4 + 3 arms x 2 points x 0.5) / 2


def test_needed_minutes_are_those_of_the_replicates_that_lack(make_sweep, fake):
    runs = [fake.Run(seed=s, final=2.0, seconds=60) for s in range(3)]
    runs += [fake.Run(arm="a", seed=s, final=2 + gap, seconds=60) for s, gap in enumerate((0.01, 0.03, -0.01))]
    row = compare(make_sweep(runs)).arms.set_index("arm").loc["a"]
    assert row["more"] == row["needed"] - 3 > 0 and row["needed_minutes"] == 2 * row["more"]


def test_nothing_finished_costs_an_unknown_time(make_sweep, fake):
    runs = [fake.Run(), fake.Run(arm="a", state="running", steps=50)]
    assert math.isnan(minutes(compare(make_sweep(runs))).pop())


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


@pytest.mark.slow
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


@pytest.mark.slow
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
