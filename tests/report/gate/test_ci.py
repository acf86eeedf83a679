"""The checked line passes and fails for each of its reasons; JUnit's rows hold the verdicts."""

import xml.etree.ElementTree as ET

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.gate.ci import checked, run_rows, verdict_rows, write_junit

pytestmark = pytest.mark.slow

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


def test_counts_names_and_messages(tmp_path):
    rows = [
        {"check": "kernel", "case": "normal", "subject": "mxfp8", "status": "PASS"},
        {"check": "kernel", "case": "<&\x00\x1b>", "subject": "a|b", "status": "FAIL", "mismatches": 2, "total": 9,
         "first_index": "[1]", "got": "0x1", "expected": "0x2", "note": None},
        {"check": "kernel", "case": "cuda", "subject": "mxfp8", "status": "SKIP", "note": "no GPU"},
        {"check": "gate", "case": "mxfp8", "status": "PASS", "note": "equivalent: inside the margin"},
    ]  # fmt: skip
    write_junit(tmp_path / "new" / "j.xml", "parity", rows)
    suite = ET.parse(tmp_path / "new" / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    good, bad, skipped, said = suite
    assert (good.get("classname"), good.get("name"), len(good)) == ("parity.kernel", "mxfp8 normal", 0)
    assert bad.get("name") == "a|b <&??>"
    assert bad.find("failure").get("message") == "2 of 9 differ, first at [1]: got 0x1, expected 0x2"
    assert skipped.find("skipped").get("message") == "no GPU"
    assert said.find("system-out").text == "equivalent: inside the margin"


def test_runs_as_cases(make_sweep, fake, tmp_path):
    rows = run_rows(make_sweep([fake.Run(), fake.Run(arm="b", state="failed", reason="boom")]))
    assert [(row["status"], row["note"]) for row in rows] == [("PASS", "finished"), ("FAIL", "failed: boom")]
    write_junit(tmp_path / "j.xml", "sweep", rows)
    assert ET.parse(tmp_path / "j.xml").getroot()[1].find("failure").get("message") == "failed: boom"
