"""`hqsweep gate` and `hqsweep baseline`: judge a sweep by a stored baseline, and keep that baseline."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hqsweep.cli.output import AsJson, Junit, OneSentence, Runs, RunsDir, print_result
from hqsweep.errors import EXIT_FAILED

app = typer.Typer(cls=OneSentence, no_args_is_help=True, help="Keep the baseline that the gate compares with.")
Baseline = Annotated[Path, typer.Option(metavar="FILE", help="The stored baseline, a JSON file to keep in git.")]


def gate(
    runs: Runs,
    baseline: Baseline,
    margin: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Largest change that counts as none, 0.25%; default: the sweep's."),
    ] = None,
    junit_file: Junit = None,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="Also append a Markdown summary to this file."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Judge runs against a stored baseline.

    Equal config and machine: every arm must be bitwise equal. Otherwise the change of its gap is judged: worse,
    better, equivalent within the margin, or undecided. Exit code: 0 good, 1 a regression, 3 failed, missing or
    damaged runs, 4 no usable baseline, or too few replicates to decide.
    """
    from hqsweep.report.gate.ci import write_junit
    from hqsweep.report.gate.gate import UNIT, append, gate, gate_markdown
    from hqsweep.sweep.store.store import RunStore

    verdicts = gate(RunStore(runs_dir).resolve(runs), baseline, margin)
    if junit_file:
        write_junit(junit_file, "gate", verdicts.rows())
    if summary:
        append(summary, gate_markdown(verdicts))
    document = {"outcome": verdicts.outcome, "unit": UNIT} | asdict(verdicts)
    print_result(as_json, document, verdicts.table(), *verdicts.notes())
    raise typer.Exit(verdicts.exit_code)


@app.callback()
def group() -> None:
    """Make the app a group: a lone command would stand for it otherwise."""


@app.command()
def update(
    runs: Runs,
    baseline: Baseline,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what is stored, and add these runs as one more draw of it.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Store runs as the baseline, and show what changes.

    Losses are stored as hex floats, which hold every bit. One stored draw may be a lucky one; --add keeps those of
    several machines side by side. Exit code 3, and the file left as it is, when a run has no final loss.
    """
    from hqsweep.report.gate.baseline_update import update
    from hqsweep.sweep.store.store import RunStore

    change = update(RunStore(runs_dir).resolve(runs), baseline, add)
    print_result(as_json, asdict(change), change.table())
    raise typer.Exit(EXIT_FAILED if change.refused else 0)
