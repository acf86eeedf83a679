"""The job summary that GitHub Actions shows on a run's page: Markdown, appended to the file $GITHUB_STEP_SUMMARY."""

from pathlib import Path

from hqsweep.report.gate import Verdicts
from hqsweep.report.text import markdown, markdown_text

MARKS = {"pass": "✅", "inconclusive": "⚠️"}


def gate_markdown(verdicts: Verdicts) -> str:
    """A heading with the verdict, the problem if there is one, and the table of the arms."""
    heading = f"### hqsweep gate: {MARKS.get(verdicts.outcome, '❌')} {verdicts.outcome}\n\n"
    problem = f"{markdown_text(verdicts.problem)}\n\n" if verdicts.problem else ""
    return heading + problem + markdown(verdicts.cells()) + "\n"


def append(path: Path, text: str) -> None:
    """Add to a file that other steps of the job write to as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
