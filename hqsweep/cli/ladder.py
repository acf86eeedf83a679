"""`hqsweep ladder`: the gap at a larger size, from sweeps of several sizes."""

from pathlib import Path
from typing import Annotated

import typer

from hqsweep.cli.output import AsJson, Runs, RunsDir, print_result, waiting


def ladder(
    sweeps: Runs,
    at: Annotated[
        str | None, typer.Option(help="Parameters to predict for, such as 124M; default: 3 times the largest.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of that training; default: as many a parameter as at the largest size.")
    ] = None,
    design: Annotated[
        str | None, typer.Option(metavar="fork|whole", help="The sweeps that laws are fitted to; default: forks.")
    ] = None,
    margin: Annotated[
        str, typer.Option(metavar="PERCENT", help="Largest gap that counts as none, in % of the baseline's loss.")
    ] = "0.25%",
    out: Annotated[Path | None, typer.Option(help="Report folder; default reports/ladder.")] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Predict gaps at a larger size, from a sweep for each size of a model.

    Two laws are fitted, and the interval holds both. From three sizes on the largest is also predicted from the
    others. The report folder gets ladder.html, ladder.md, ladder.svg, ladder.csv and measured.csv.
    """
    with waiting("fitting the laws"):
        from hqsweep.api.ladder import ladder as fitted
        from hqsweep.report.pages.ladder import rich_tables

        found = fitted(*sweeps, at=at, tokens=tokens, design=design, margin=margin, runs_dir=runs_dir)
        page = found.report(out or Path("reports/ladder"))
    lines = repr(found).splitlines()
    print_result(as_json, found.document | {"report": str(page)}, *rich_tables(found._found), *lines, f"report: {page}")
