"""The gate's verdicts and exit codes."""

import json

import pytest
from rich.console import Console

from hqsweep.errors import UserError
from hqsweep.report.baseline import update
from hqsweep.report.gate import decide, gate


@pytest.fixture
def stored(make_sweep, fake, tmp_path):
    """A baseline file of three arms by three seeds."""
    path = tmp_path / "baselines" / "sweep.json"
    assert update(make_sweep(fake.three_arms(), "stored"), path).refused is None
    return path


def outcomes(verdicts) -> dict[str, str]:
    return {verdict.arm: verdict.outcome for verdict in verdicts.verdicts}


def test_the_same_numbers_pass_and_are_bitwise_equal(make_sweep, fake, stored):
    verdicts = gate(make_sweep(fake.three_arms()), stored, max_gap=0)
    assert verdicts.exit_code == 0 and all(verdict.bitwise and verdict.seeds == 3 for verdict in verdicts.verdicts)
    assert {verdict.note for verdict in verdicts.verdicts} == {"bitwise equal"}


def test_a_rise_above_max_gap_is_a_regression_of_that_arm_only(make_sweep, fake, stored):
    runs = [*fake.three_arms()[:6], *(fake.Run(arm="nvfp4", seed=seed, gap=0.06) for seed in range(3))]
    runs = make_sweep(runs)
    verdicts = gate(runs, stored, max_gap=0.01)
    assert verdicts.exit_code == 1
    assert outcomes(verdicts) == {"bf16": "pass", "mxfp8": "pass", "nvfp4": "regression"}
    assert 0.02 < verdicts.verdicts[2].gap < 0.04
    assert gate(runs, stored, max_gap=0.05).exit_code == 0


def test_a_fall_is_no_regression(make_sweep, fake, stored):
    runs = [*fake.three_arms()[:6], *(fake.Run(arm="nvfp4", seed=seed, gap=-0.5) for seed in range(3))]
    assert gate(make_sweep(runs), stored).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "outcome", "code", "says"),
    [
        ({"state": "failed", "reason": "killed"}, "failed", 3, "seed 2 failed (killed)"),
        ({"state": "failed", "reason": "loss is nan at step 90"}, "regression", 1, "loss is nan at step 90"),
        ({"nan_from": 190}, "regression", 1, "seed 2 finished without a finite val_loss"),
        ({"state": "interrupted"}, "failed", 3, "seed 2 interrupted"),
    ],
)
def test_a_run_without_a_result(make_sweep, fake, stored, changes, outcome, code, says):
    runs = [*fake.three_arms()[:8], fake.Run(arm="nvfp4", seed=2, gap=0.03, **changes)]
    verdicts = gate(make_sweep(runs), stored)
    assert verdicts.exit_code == code and outcomes(verdicts)["nvfp4"] == outcome
    assert says in verdicts.verdicts[2].note


def test_missing_runs_and_arms_exit_3_and_new_arms_pass(make_sweep, fake, stored):
    verdicts = gate(make_sweep([*fake.three_arms()[:5], fake.Run(arm="mxfp6")]), stored)
    assert outcomes(verdicts) == {"bf16": "pass", "mxfp8": "missing", "mxfp6": "new", "nvfp4": "missing"}
    assert verdicts.exit_code == 3 and "seed 2 is not in this sweep" in verdicts.verdicts[1].note


def test_another_machine_is_named_when_curves_differ(make_sweep, fake, stored):
    runs = make_sweep(fake.three_arms(threads=1))
    document = json.loads(stored.read_text())
    ids = {(run.manifest()["arm"], run.manifest()["seed"]): run.manifest()["run_id"] for run in runs}
    for entry in document["runs"]:
        entry |= {"curve_sha256": "0", "run_id": ids[entry["arm"], entry["seed"]]}
    stored.write_text(json.dumps(document))
    verdicts = gate(runs, stored)
    assert verdicts.exit_code == 0 and verdicts.outcome == "pass" and not verdicts.verdicts[0].bitwise
    assert verdicts.verdicts[0].note == "curves differ, and so does threads 2 -> 1; gap not above 0.01 nats"


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": 99}', '{"version": 1, "runs": [{"arm": "bf16"}]}'])
def test_no_usable_baseline_is_4(make_sweep, fake, tmp_path, content):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    verdicts = gate(make_sweep(fake.three_arms()), path)
    assert verdicts.exit_code == 4 and str(path) in verdicts.problem and "hqsweep baseline update" in verdicts.problem


def test_no_common_arm_is_4(make_sweep, fake, stored):
    verdicts = gate(make_sweep([fake.Run(arm="other")]), stored)
    assert verdicts.exit_code == 4 and "bf16, mxfp8, nvfp4" in verdicts.problem
    assert verdicts.rows()[-1] == {"check": "gate", "case": "baseline", "status": "FAIL", "note": verdicts.problem}


def test_all_runs_of_a_known_arm_failed_is_3(make_sweep, fake, stored):
    assert gate(make_sweep([fake.Run(state="failed", reason="x")]), stored).exit_code == 3


def test_an_equal_machine_and_config_must_be_bitwise_equal(make_sweep, fake, stored):
    runs = make_sweep(fake.three_arms())
    document = json.loads(stored.read_text())
    document["runs"][0]["curve_sha256"] = "0"
    stored.write_text(json.dumps(document))
    verdicts = gate(runs, stored, max_gap=9)
    assert verdicts.exit_code == 1
    assert outcomes(verdicts) == {"bf16": "regression", "mxfp8": "pass", "nvfp4": "pass"}
    assert verdicts.verdicts[0].note == "curves differ on an equal machine and config" and verdicts.verdicts[0].gap == 0


def test_what_the_seeds_cannot_decide_is_inconclusive_and_exits_4(make_sweep, fake, stored):
    noisy = [fake.Run(arm="nvfp4", seed=seed, gap=0.03 + 0.04 * (-1) ** seed) for seed in range(3)]
    verdicts = gate(make_sweep([*fake.three_arms()[:6], *noisy]), stored)
    last = verdicts.verdicts[-1]
    assert (verdicts.outcome, verdicts.exit_code, last.outcome) == ("inconclusive", 4, "inconclusive")
    assert last.low < 0.01 < last.high and "seeds would be needed to tell it from 0.01 nats" in last.note
    assert [row["status"] for row in verdicts.rows()] == ["PASS", "PASS", "SKIP"]


def test_one_seed_decides_nothing_unless_it_is_bitwise_equal(make_sweep, fake, tmp_path):
    path = tmp_path / "one.json"
    update(make_sweep([fake.Run(arm="nvfp4", gap=0.03)], "one"), path)
    verdicts = gate(make_sweep([fake.Run(arm="nvfp4", gap=5.0)], "two"), path)
    assert verdicts.exit_code == 4 and "more seeds would be needed" in verdicts.verdicts[0].note
    assert gate(make_sweep([fake.Run(arm="nvfp4", gap=0.03)], "three"), path).exit_code == 0


def test_decide_corrects_for_the_number_of_arms():
    gaps = [0.02, 0.03, 0.045]  # one-sided p of being above 0: 0.025 / 1.2
    assert decide({"a": gaps}, 0.0) == {"a": "regression"}
    assert decide({"a": gaps, "b": [0.01, -0.01, 0.0]}, 0.0) == {"a": "inconclusive", "b": "inconclusive"}
    assert decide({"a": gaps}, 0.1) == {"a": "pass"} and decide({"a": [0.0]}, 0.1) == {"a": "inconclusive"}
    assert decide({"a": [0.0, 0.0]}, 0.0) == {"a": "pass"} and decide({"a": []}, 0.0) == {"a": "inconclusive"}


def test_rows_and_table(make_sweep, fake, stored):
    verdicts = gate(make_sweep(fake.three_arms()[:6]), stored)
    assert [(row["case"], row["status"]) for row in verdicts.rows()] == [
        ("bf16", "PASS"),
        ("mxfp8", "PASS"),
        ("nvfp4", "FAIL"),
    ]
    console = Console(width=120, record=True)
    console.print(verdicts.table())
    assert "bitwise equal" in console.export_text()


def test_max_gap_must_not_be_negative(make_sweep, fake, stored):
    with pytest.raises(UserError, match="max_gap: -1 nats"):
        gate(make_sweep([fake.Run()]), stored, max_gap=-1)
