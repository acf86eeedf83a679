"""The checked line passes and fails for each of its reasons; JUnit's rows hold the verdicts."""

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.gate.check import checked, verdict_rows

GAPS = {
    "null": lambda seed, point: 1e-4 * (-1) ** seed,
    "mxfp8": lambda seed, point: 0.002 + 1e-4 * seed,
    "mxfp4": lambda seed, point: 0.03 + 1e-3 * seed,
    "nvfp4": lambda seed, point: 0.01 * (seed - 1),
}


def study(make_sweep, fake, changes=None, arm="mxfp8", **gaps):
    """The comparison of a fork study; the first fork of `arm` has `changes`."""
    runs = fake.fork_study(GAPS | gaps, points=(40,))
    first = next(run for run in runs if run.arm == arm)
    return compare(make_sweep([fake.Run(**vars(run) | (changes or {} if run is first else {})) for run in runs]))


def test_passes_with_all_runs_finished_learnt_and_an_equivalent_null_arm(make_sweep, fake):
    good, line = checked(study(make_sweep, fake))
    assert good and line.startswith("check passed: 24 of 24 runs finished; the highest final loss, 2.03")
    assert f"unigram entropy of {fake.entropy:.4f}" in line
    assert line.endswith("'null' is +0.0000 % from 'bf16', inside the margin of 0.25 %")


@pytest.mark.parametrize(
    ("arm", "changes", "says"),
    [
        ("mxfp8", {"state": "failed", "reason": "x"}, "'mxfp8' has 3 finished, 1 failed"),
        ("trunk", {"state": "interrupted"}, "'sweep/bf16-s0-"),
        ("nvfp4", {"base": 30.0}, "not below the unigram entropy of 3.1000"),
        ("nvfp4", {"base": float("nan")}, "'nvfp4' has a run without a finite loss"),
    ],
)
def test_fails_and_says_why(make_sweep, fake, arm, changes, says):
    good, line = checked(study(make_sweep, fake, changes, arm))
    assert not good and line.startswith("check failed: ") and says in line


def test_a_null_arm_that_is_not_equal_or_not_there_fails(make_sweep, fake):
    apart = {"null": lambda seed, point: 0.02 + 1e-4 * seed}
    assert checked(study(make_sweep, fake, **apart)) == (False, "check failed: 'null' is not shown equal to 'bf16'")
    alone = compare(make_sweep(fake.three_arms(), "whole"))
    assert checked(alone) == (False, "check failed: there is no null arm; null_arm=true adds one")


def test_the_floor_is_what_the_manifest_states(make_sweep, fake):
    comparison = study(make_sweep, fake)
    del comparison.frames.runs["manifest.data.unigram_entropy_nats"]
    good, line = checked(comparison)
    assert good and "entropy" not in line


def test_each_arm_is_a_test_of_junit_with_its_sentence(make_sweep, fake):
    rows = {row["case"]: row for row in verdict_rows(study(make_sweep, fake))}
    assert {arm: row["status"] for arm, row in rows.items()} == {
        "null": "PASS", "mxfp8": "PASS", "mxfp4": "FAIL", "nvfp4": "SKIP",
    }  # fmt: skip
    assert rows["mxfp4"]["note"].startswith("worse than 'bf16' by 1.57 %")
    assert rows["mxfp8"]["note"].endswith("inside the margin of 0.25 %.") and rows["mxfp8"]["note"].startswith("worse")
    assert rows["null"]["note"].startswith("Null arm: equivalent to 'bf16' within 0.25 %")
