"""The verdicts of the gate on each arm, and on the sweep; as a table, as rows for JUnit, as an exit code."""

import math
from dataclasses import dataclass, field
from typing import Any

from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_UNDECIDED
from hqsweep.report.compare.left_out import LeftOut, note
from hqsweep.report.pages.fitted import Fitted
from hqsweep.report.pages.text import TextTable, number, text, to_rich

STYLE = {"pass": "green", "new": "yellow", "undecided": "yellow"}
EXIT_CODES = {
    "pass": 0, "regression": EXIT_MISMATCH, "failed": EXIT_FAILED, "undecided": EXIT_UNDECIDED,
    "no baseline": EXIT_UNDECIDED,
}  # fmt: skip
UNIT = "% of the stored loss of the baseline arm"
"""The unit of gap, ci_low, ci_high and margin."""
JUNIT = {"pass": "PASS", "new": "PASS", "undecided": "SKIP"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One arm.

    outcome    pass, regression, undecided, failed, missing (a stored run is not in the sweep) or new (the arm is not in
               the baseline)
    verdict    worse, better, equivalent or undecided: what the change since the baseline was stored is called; None
               where there is nothing to hold against it
    gap        that change in % of the stored loss of the baseline arm, from ci_low to ci_high its 95 % interval; 0
               where all curves are equal bit for bit, NaN for none
    n          seeds, or trunks, that are on both sides
    needed     of these in all, for a verdict; inf for out of reach, NaN where there is one or nothing to tell it from
    recipe     how the arm's recipe changed, "" for not at all
    """

    arm: str
    outcome: str
    verdict: str | None = None
    gap: float = math.nan
    ci_low: float = math.nan
    ci_high: float = math.nan
    margin: float
    n: int = 0
    within_margin: bool = False
    needed: float = math.nan
    bitwise: bool = False
    recipe: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The verdicts of all arms; `replicates` is what n counts (seeds, trunks), `margin` is in %, `problem` says why
    there is no usable baseline, `left_out` has the runs that are missing, damaged or no runs of the sweep."""

    arms: tuple[Verdict, ...] = field(default=())
    replicates: str
    margin: float
    problem: str | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def outcome(self) -> str:
        """The sweep in one word: no baseline, regression, failed, undecided or pass, the worst first."""
        outcomes = {arm.outcome for arm in self.arms}
        if self.problem:
            return "no baseline"
        if "regression" in outcomes:
            return "regression"
        if self.left_out or outcomes & {"failed", "missing"}:
            return "failed"
        return "undecided" if "undecided" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        """0 all good; 1 a regression; 3 a failed or missing run; 4 no baseline, or an arm that is undecided."""
        return EXIT_CODES[self.outcome]

    def rows(self) -> list[dict[str, Any]]:
        """The arms, and the problem if there is one, as rows for junit.write; the note starts with the verdict."""
        cases = [
            (arm.arm, JUNIT.get(arm.outcome, "FAIL"), ": ".join(filter(None, (arm.verdict, arm.note))))
            for arm in self.arms
        ]
        cases += [("baseline", "FAIL", self.problem)] if self.problem else []
        cases += [(entry.run, "FAIL", entry.line) for entry in self.left_out]
        return [{"check": "gate", "case": case, "status": status, "note": note} for case, status, note in cases]

    def cells(self) -> TextTable:
        """The arms, for a terminal and for a job summary."""
        rows = tuple(
            (
                arm.arm,
                arm.outcome,
                text(arm.verdict),
                *(number(value, "+.3f") for value in (arm.gap, arm.ci_low, arm.ci_high)),
                str(arm.n),
                arm.note,
            )
            for arm in self.arms
        )
        header = ("arm", "gate", "verdict", "change %", "95 % from", "to", self.replicates, "note")
        return TextTable(header=header, rows=rows, numeric=frozenset({3, 4, 5, 6}))

    def table(self) -> Fitted:
        """The arms for a terminal."""
        styles = [STYLE.get(arm.outcome, "red") for arm in self.arms]
        return to_rich(self.cells(), f"gate: {self.outcome}, margin {self.margin:g} %", styles)

    def notes(self) -> list[str]:
        """The notes below the table, and in a job summary."""
        return [*([self.problem] if self.problem else []), *note(self.left_out)]
