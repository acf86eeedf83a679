"""`hqsweep compare`: which recipes are worse, better or equivalent."""

from pathlib import Path
from typing import Annotated

import typer

from hqsweep.cli.output import AsJson, Junit, Runs, RunsDir, print_result, waiting
from hqsweep.errors import EXIT_MISMATCH


def compare(
    runs: Runs,
    baseline: Annotated[
        str | None,
        typer.Option(help="Arm, or recipe, that the others are measured against; default: the sweep's, else bf16."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Report folder; default reports/SWEEP.")] = None,
    window: Annotated[
        float, typer.Option(help="Last steps, or last part of a run, over which losses are averaged.")
    ] = 0.1,
    margin: Annotated[
        str | None,
        typer.Option(help="Largest gap that counts as none, in % of the baseline's loss; default: the sweep's, 0.25%."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit 1 unless all runs finished, all learnt, and the null arm is equivalent."),
    ] = False,
    track: Annotated[
        bool, typer.Option("--track", help="Show the verdicts beside the runs in W&B or TensorBoard, too.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Exit 0 though runs are missing or not finished; damaged ones stay 3.")
    ] = False,
    figures: Annotated[
        str | None,
        typer.Option(metavar="svg|png", help="Also write every figure as a file of its own, into paper/ there."),
    ] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Also write the tables as LaTeX, into paper/ there.")] = False,
    junit_file: Junit = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Say which recipes are worse, better or equivalent, and write a report.

    A table here; HTML, Markdown, CSV and Parquet in the report folder. Exit code 3 where runs are missing, damaged or
    not finished: they are named and left out.
    """
    with waiting("reading the runs and writing the report"):
        from hqsweep.api.comparison import compared
        from hqsweep.report.compare.compare import document, write
        from hqsweep.report.compare.left_out import exit_code
        from hqsweep.report.gate.ci import checked, verdict_rows, write_junit
        from hqsweep.report.pages.paper import check_kind, write_figures, write_latex
        from hqsweep.report.pages.tables import rich_table
        from hqsweep.sweep.store.store import RunStore
        from hqsweep.track.open import mirror_report

        if figures:
            check_kind(figures)
        selected = RunStore(runs_dir).resolve(runs)
        comparison = compared(selected, baseline, window, margin)
        page = write(comparison, out or Path("reports", "+".join(dict.fromkeys(run.sweep for run in selected))))
        paper = write_figures(comparison, figures, page.parent / "paper") if figures else []
        paper += write_latex(comparison, page.parent / "paper") if latex else []
    if junit_file:
        write_junit(junit_file, "compare", verdict_rows(comparison))
    good, line = checked(comparison) if check else (True, "")
    result = document(comparison) | {"report": str(page), "paper": [str(path) for path in paper], "check": line or None}
    lines = [
        f"baseline: {comparison.baseline} ({comparison.baseline_why})",
        f"report: {page}",
        *([f"for paper: {len(paper)} files in {paper[0].parent}"] if paper else []),
        *([line] if line else []),
    ]
    if track and not mirror_report(selected, page.parent, result["arms"]):
        lines.append(
            "--track: neither W&B nor TensorBoard has taken the report; the sweep's track.kind says which should"
        )
    print_result(as_json, result, rich_table(comparison), *lines)
    raise typer.Exit(exit_code(comparison.left_out, partial) if good else EXIT_MISMATCH)
