"""What the gate says: a verdict of each arm, their exit code, table, Markdown and JUnit XML."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_UNDECIDED
from hqsweep.report.compare.left_out import LeftOut, note
from hqsweep.report.pages.text import Fitted, TextTable, markdown, markdown_text, number, text, to_rich

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
    there is no usable baseline, `left_out` has the runs that are missing, damaged or no runs of the sweep. `end`: the
    gaps that changed belong to whole runs of so many steps, None for others."""

    arms: tuple[Verdict, ...] = field(default=())
    replicates: str
    margin: float
    problem: str | None = None
    left_out: tuple[LeftOut, ...] = ()
    end: int | None = None

    SIGN: ClassVar[str] = " %"
    """What stands after the margin and after changes."""

    def places(self, half: float) -> str:
        """The format of a change whose interval reaches `half` to either side."""
        return "+.3f"

    @property
    def margin_text(self) -> str:
        return f"{self.margin:.3g}{self.SIGN}"

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
        """The arms, and the problem if there is one, as rows for ci.write_junit; the note starts with the verdict."""
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
                *(
                    number(value, self.places((arm.ci_high - arm.ci_low) / 2))
                    for value in (arm.gap, arm.ci_low, arm.ci_high)
                ),
                str(arm.n),
                arm.note,
            )
            for arm in self.arms
        )
        header = ("arm", "gate", "verdict", f"change{self.SIGN}", "95 % from", "to", self.replicates, "note")
        return TextTable(header=header, rows=rows, numeric=frozenset({3, 4, 5, 6}))

    def table(self) -> Fitted:
        """The arms for a terminal."""
        styles = [STYLE.get(arm.outcome, "red") for arm in self.arms]
        return to_rich(self.cells(), f"gate: {self.outcome}, {self.measure}", styles)

    @property
    def measure(self) -> str:
        """ "margin 0.25 %, gaps of whole runs of 480 steps"."""
        return f"margin {self.margin_text}" + (f", gaps of whole runs of {self.end} steps" if self.end else "")

    def notes(self) -> list[str]:
        """The notes below the table, and in a job summary."""
        return [*([self.problem] if self.problem else []), *note(self.left_out)]


MARKS = {"pass": "✅", "undecided": "⚠️"}


def gate_markdown(verdicts: Verdicts) -> str:
    """A heading with the verdict, the problem and the runs that are left out, if any, and the table of the arms."""
    mark = MARKS.get(verdicts.outcome, "❌")
    heading = f"### hqsweep gate: {mark} {verdicts.outcome}, {verdicts.measure}\n\n"
    notes = "".join(f"{markdown_text(line)}\n\n" for line in verdicts.notes())
    return heading + notes + markdown(verdicts.cells()) + "\n"


def append(path: Path, text: str) -> None:
    """Add to a file that other steps of the job write to as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
