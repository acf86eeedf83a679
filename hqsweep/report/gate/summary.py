"""The job summary that GitHub Actions shows on a run's page: Markdown, appended to the file $GITHUB_STEP_SUMMARY."""

from pathlib import Path

from hqsweep.report.gate.gate_verdicts import Verdicts
from hqsweep.report.pages.text import markdown, markdown_text

MARKS = {"pass": "✅", "undecided": "⚠️"}


def gate_markdown(verdicts: Verdicts) -> str:
    """A heading with the verdict, the problem and the runs that are left out, if any, and the table of the arms."""
    mark = MARKS.get(verdicts.outcome, "❌")
    heading = f"### hqsweep gate: {mark} {verdicts.outcome}, margin {verdicts.margin:g} %\n\n"
    notes = "".join(f"{markdown_text(line)}\n\n" for line in verdicts.notes())
    return heading + notes + markdown(verdicts.cells()) + "\n"


def append(path: Path, text: str) -> None:
    """Add to a file that other steps of the job write to as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
