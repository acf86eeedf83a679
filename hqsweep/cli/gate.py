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
    max_gap: Annotated[float, typer.Option(help="Largest rise of an arm's final loss, in nats.")] = 0.01,
    junit_file: Junit = None,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="Also append a Markdown summary to this file."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Judge runs against a stored baseline.

    Equal config and machine: every arm must be bitwise equal. Otherwise the 95 % interval of its gap, paired by seed,
    is judged against --max-gap. Exit code: 0 good, 1 a regression, 3 failed or missing runs, 4 no usable baseline, or
    too few seeds to decide.
    """
    from hqsweep.report import junit
    from hqsweep.report.gate import gate
    from hqsweep.report.summary import append, gate_markdown
    from hqsweep.sweep.store import RunStore

    verdicts = gate(RunStore(runs_dir).resolve(runs), baseline, max_gap)
    if junit_file:
        junit.write(junit_file, "gate", verdicts.rows())
    if summary:
        append(summary, gate_markdown(verdicts))
    document = {"outcome": verdicts.outcome} | asdict(verdicts)
    print_result(as_json, document, verdicts.table(), *([verdicts.problem] if verdicts.problem else []))
    raise typer.Exit(verdicts.exit_code)


@app.callback()
def group() -> None:
    """Without this, a lone command would stand for the group."""


@app.command()
def update(runs: Runs, baseline: Baseline, runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Store runs as the baseline, and show what changes.

    Losses are stored as hex floats, which hold every bit. Exit code 3, and the file left as it is, when a run has no
    final loss.
    """
    from hqsweep.report.baseline import update
    from hqsweep.sweep.store import RunStore

    change = update(RunStore(runs_dir).resolve(runs), baseline)
    print_result(as_json, asdict(change), change.table())
    raise typer.Exit(EXIT_FAILED if change.refused else 0)
