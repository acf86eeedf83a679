"""Results for CI: JUnit XML of verdicts, runs and checks, which every CI system shows, and the line of `hqsweep compare
--check`, with which the quickstart ends."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.curves import ENTROPY
from hqsweep.report.compare.frames import Frames
from hqsweep.report.compare.verdict import IDENTICAL, identity
from hqsweep.report.pages.checks import first_mismatch
from hqsweep.report.pages.text import legal
from hqsweep.sweep.store.run_dir import RunDir

JUNIT = {"equivalent": "PASS", "better": "PASS", "undecided": "SKIP", "unfinished": "SKIP"}
"""Verdict -> status; all others fail."""


def checked(comparison: Comparison) -> tuple[bool, str]:
    """(good, sentence): every run finished, trunks included; every arm's mean final loss is below the unigram entropy
    of the validation data, which a model that ignores its context cannot beat, as the runs' manifests state it;
    every null arm is equivalent to its baseline within the margin; and no other arm is identical to its baseline. A
    comparison without a null arm is not good."""
    arms = comparison.arms
    floor = _stated_floor(comparison.frames)
    trunks = comparison.trunks.runs
    faults = [f"'{run.run}' is {run.state}" for run in trunks[trunks["state"] != "finished"].itertuples()]
    lost = set(comparison.finals["arm"][comparison.finals["final_loss"].isna()])
    faults += [fault for row in arms.itertuples() if (fault := _fault(row, row.arm in lost, floor))]
    nulls = list(arms[arms["null"]].itertuples())
    faults += [f"'{row.arm}' is not shown equal to '{row.baseline}'" for row in nulls if not row.within_margin]
    faults += [] if nulls else ["there is no null arm; null_arm=true adds one"]
    if faults:
        return False, f"check failed: {'; '.join(faults)}"
    runs = len(comparison.frames.runs) + len(trunks)
    clauses = [f"{runs} of {runs} runs finished"]
    if floor is not None:
        highest = arms["final_loss"].max()
        clauses.append(f"the highest final loss, {highest:.4f} nats, is below the unigram entropy of {floor:.4f}")
    clauses += [
        f"'{row.arm}' is {row.gap_pct:+.4f} % from '{row.baseline}', inside the margin of {row.margin_pct:.3g} %"
        for row in nulls
    ]
    return True, f"check passed: {'; '.join(clauses)}"


def _fault(row: Any, lost: bool, floor: float | None) -> str | None:
    """The first thing that is wrong with an arm (a row of Comparison.arms), None when all is well; `lost` says that one
    of its runs has no finite loss."""
    if row.state != f"{row.runs} finished":
        return f"'{row.arm}' has {row.state}"
    if lost:
        return f"'{row.arm}' has a run without a finite loss"
    if row.verdict == IDENTICAL:
        return f"'{row.arm}' is {identity(row._asdict())}"
    if floor is not None and not row.final_loss < floor:
        return f"'{row.arm}' ends at {row.final_loss:.4f} nats, not below the unigram entropy of {floor:.4f}"
    return None


def _stated_floor(frames: Frames) -> float | None:
    """The lowest unigram entropy that a manifest states, in nats; None when none does."""
    lowest = frames.runs[ENTROPY].min() if ENTROPY in frames.runs else math.nan
    return None if math.isnan(lowest) else float(lowest)


def verdict_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a row per arm except the baseline, for write_junit.

    Equivalent and better arms pass, undecided and unfinished ones are skipped, all others fail. A worse arm passes,
    too, if its gap is proven to be inside the margin.
    """
    arms = comparison.arms[comparison.arms["arm"] != comparison.arms["baseline"]]
    return [
        {
            "check": "verdict",
            "case": row.arm,
            "status": "PASS" if row.within_margin else JUNIT.get(row.verdict, "FAIL"),
            "note": row.sentence,
        }
        for row in arms.itertuples()
    ]


ELEMENT = {"FAIL": "failure", "SKIP": "skipped"}


def write_junit(path: Path, suite: str, rows: Iterable[Mapping[str, Any]]) -> None:
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
    """A row per run for write_junit(): PASS when it finished, else FAIL with its state and reason."""
    rows = []
    for run in run_dirs:
        status = run.seen()
        note = status["state"] + (f": {status['reason']}" if status["reason"] else "")
        verdict = "PASS" if status["state"] == "finished" else "FAIL"
        rows.append({"check": "run", "case": run.name, "status": verdict, "note": note, "seconds": status["seconds"]})
    return rows
