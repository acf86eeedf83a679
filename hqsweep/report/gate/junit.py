"""JUnit XML, which every CI system shows."""

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hqsweep.report.pages.parity import first_mismatch
from hqsweep.report.pages.text import legal
from hqsweep.sweep.store.run_dir import RunDir

ELEMENT = {"FAIL": "failure", "SKIP": "skipped"}


def write(path: Path, suite: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """One testcase per row: classname is `check`, name is `subject` and `case`, `status` is PASS, FAIL or SKIP; the
    message of what did not pass is the row's first mismatch or its note, and the note of a pass is its output. Takes
    rows of parity.jsonl, Verdicts.rows(), run_rows() and verdict_rows()."""
    rows = list(rows)
    count = {status: str(sum(row["status"] == status for row in rows)) for status in ELEMENT}
    root = ET.Element(
        "testsuite", name=legal(suite), tests=str(len(rows)), failures=count["FAIL"], errors="0", skipped=count["SKIP"]
    )
    for row in rows:
        name = " ".join(filter(None, (row.get("subject"), row.get("case"))))
        case = ET.SubElement(root, "testcase", classname=legal(f"{suite}.{row['check']}"), name=legal(name))
        if row.get("seconds") is not None:
            case.set("time", f"{row['seconds']:.3f}")
        if row["status"] in ELEMENT:
            ET.SubElement(case, ELEMENT[row["status"]], message=legal(first_mismatch(row)))
        elif row.get("note"):
            ET.SubElement(case, "system-out").text = legal(row["note"])
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def run_rows(run_dirs: Iterable[RunDir]) -> list[dict[str, Any]]:
    """A row per run for write(): PASS when it finished, else FAIL with its state and reason."""
    rows = []
    for run in run_dirs:
        status = run.seen()
        note = status["state"] + (f": {status['reason']}" if status["reason"] else "")
        verdict = "PASS" if status["state"] == "finished" else "FAIL"
        rows.append({"check": "run", "case": run.name, "status": verdict, "note": note, "seconds": status["seconds"]})
    return rows
