"""JUnit XML that parses, with failures and skips counted and nothing illegal in it."""

import xml.etree.ElementTree as ET

from hqsweep.report.gate.junit import run_rows, write


def test_counts_names_and_messages(tmp_path):
    rows = [
        {"check": "kernel", "case": "normal", "subject": "mxfp8", "status": "PASS"},
        {"check": "kernel", "case": "<&\x00\x1b>", "subject": "a|b", "status": "FAIL", "mismatches": 2, "total": 9,
         "first_index": "[1]", "got": "0x1", "expected": "0x2", "note": None},
        {"check": "kernel", "case": "cuda", "subject": "mxfp8", "status": "SKIP", "note": "no GPU"},
        {"check": "gate", "case": "mxfp8", "status": "PASS", "note": "equivalent: inside the margin"},
    ]  # fmt: skip
    write(tmp_path / "new" / "j.xml", "parity", rows)
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
    write(tmp_path / "j.xml", "sweep", rows)
    assert ET.parse(tmp_path / "j.xml").getroot()[1].find("failure").get("message") == "failed: boom"
